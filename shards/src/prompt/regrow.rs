//! The text of a grown conversation from the text of the last turn, by rendering only its end.
//!
//! Two excerpts are rendered, the same messages before what is new in both: the last turn's end and the new turn's
//! end. Where the texts of the excerpts part, the whole texts part too, and what follows is equal, for a template that
//! treats a message by what stands near it. That a template does so is not assumed. For every shape of an excerpt the
//! first results are compared with the whole render, later ones now and then; the first difference ends it for the
//! template. The old text must end as the old excerpt does.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use minijinja::Value;

use super::conversation::{Message, Role};
use super::frame::Frame;
use super::memory::{Excerpt, common_prefix};
use super::model::Model;
use super::template::Template;
use crate::service::MissReason;

/// Results of a shape that are compared with the whole render before any is not.
const CHECKED_FIRST: u32 = 2;
/// After them every so many results of a template are.
const CHECKED_EVERY: u64 = 64;
/// Shapes of a template that are told apart; conversations of further ones are rendered whole.
const SHAPES_MAX: usize = 1024;
/// Templates of a shard that are told apart; beyond them all are forgotten and learnt anew.
const TEMPLATES_MAX: usize = 32;
/// Bytes before the parting that the old text and the old excerpt must share too.
const SHARED_BYTES_MIN: usize = 16;
/// Bytes of source that an excerpt may have: it is rendered in one go.
const EXCERPT_BYTES_MAX: usize = 48 * 1024;
/// System messages at the begin that every excerpt has.
const LEADING_MAX: usize = 2;

/// How far templates have been seen to treat a message by what stands near it.
#[derive(Debug, Default)]
pub(super) struct Trust {
    templates: HashMap<(usize, usize), Record>,
    /// See [`super::PrefixStats`].
    pub regrown: u64,
    pub checked: u64,
    pub differences: u64,
}

#[derive(Debug)]
struct Record {
    /// Keeps the template's address its own.
    _model: Arc<Model>,
    refused: bool,
    uses: u64,
    shapes: HashMap<u64, u32>,
}

/// What has to be done with a text made this way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Refused,
    Check,
    Trusted,
}

impl Trust {
    /// Compares an edit with the whole render, and remembers how it came out.
    pub(super) fn judge(
        &mut self,
        model: &Arc<Model>,
        template: &Template,
        expected: &Expected,
        rendered: &str,
    ) -> bool {
        self.checked += 1;
        let same = expected.text == rendered;
        let record = self.record(model, template);
        if same {
            *record.shapes.entry(expected.shape).or_default() += 1;
        } else {
            tracing::debug!("a chat template's text depends on more than near messages: it is always rendered whole");
            record.refused = true;
            self.differences += 1;
        }
        same
    }

    fn record(&mut self, model: &Arc<Model>, template: &Template) -> &mut Record {
        let key = (Arc::as_ptr(model) as usize, std::ptr::from_ref(template) as usize);
        if self.templates.len() >= TEMPLATES_MAX && !self.templates.contains_key(&key) {
            self.templates.clear();
        }
        let fresh = || Record { _model: Arc::clone(model), refused: false, uses: 0, shapes: HashMap::new() };
        self.templates.entry(key).or_insert_with(fresh)
    }
}

impl Record {
    fn verdict(&mut self, shape: u64) -> Verdict {
        if self.refused || (self.shapes.len() >= SHAPES_MAX && !self.shapes.contains_key(&shape)) {
            return Verdict::Refused;
        }
        self.uses += 1;
        let seen = self.shapes.entry(shape).or_default();
        if *seen < CHECKED_FIRST || self.uses.is_multiple_of(CHECKED_EVERY) { Verdict::Check } else { Verdict::Trusted }
    }
}

/// A conversation and the one it grew from.
pub(super) struct Growth<'a> {
    pub model: &'a Arc<Model>,
    pub template: &'a Template,
    pub frame: &'a Frame,
    /// The old conversation's text.
    pub text: &'a str,
    /// What the old conversation has after the messages that both share.
    pub dropped: &'a [Message],
    /// The new conversation.
    pub messages: &'a [Message],
    /// Messages that both share.
    pub shared: usize,
    /// The excerpt rendered last time.
    pub excerpt: Option<Excerpt>,
    /// The whole is too large to be rendered here.
    pub large: bool,
}

/// The text of a conversation.
pub(super) enum Grown {
    /// The old text up to a place, and what follows.
    Edit { keep: usize, tail: String, excerpt: Excerpt },
    /// All of it.
    Whole(String),
    /// It must be rendered elsewhere, and may be compared with what is expected.
    Unknown(Option<Expected>),
}

/// A text made by an edit, before it is compared with the whole render.
#[derive(Debug)]
pub(super) struct Expected {
    pub text: String,
    pub excerpt: Excerpt,
    shape: u64,
}

impl Growth<'_> {
    /// The new conversation's text.
    ///
    /// # Errors
    /// As [`Frame::render`].
    pub(super) fn text(self, trust: &mut Trust) -> Result<Grown, MissReason> {
        let large = self.large;
        let whole = || {
            if large {
                Ok(Grown::Unknown(None))
            } else {
                self.frame.render(self.messages, self.template).map(Grown::Whole)
            }
        };
        let Some(chosen) = self.chosen().filter(|_| self.frame.is_plain(self.messages, self.template)) else {
            return whole();
        };
        let record = trust.record(self.model, self.template);
        let shape = self.shape(&chosen);
        let verdict = record.verdict(shape);
        if verdict == Verdict::Refused {
            return whole();
        }
        let Some((keep, tail, excerpt)) = self.edit(chosen) else { return whole() };
        if verdict == Verdict::Check {
            let text = self.text[..keep].to_owned() + &tail;
            if large {
                return Ok(Grown::Unknown(Some(Expected { text, excerpt, shape })));
            }
            let rendered = self.frame.render(self.messages, self.template)?;
            let expected = Expected { text, excerpt: excerpt.clone(), shape };
            if !trust.judge(self.model, self.template, &expected, &rendered) {
                return Ok(Grown::Whole(rendered));
            }
        }
        trust.regrown += 1;
        Ok(Grown::Edit { keep, tail, excerpt })
    }

    fn added(&self) -> &[Message] {
        &self.messages[self.shared..]
    }

    /// The shared messages that stand in both excerpts; none where the excerpt would save nothing.
    fn chosen(&self) -> Option<Vec<u32>> {
        let shared = &self.messages[..self.shared];
        let leading = shared.iter().take(LEADING_MAX).take_while(|m| m.role == Role::System).count();
        let user = shared.iter().rposition(|m| m.role == Role::User).filter(|place| *place >= leading)?;
        let asks = |messages: &[Message]| messages.iter().any(|m| m.role == Role::User);
        let from = if asks(self.dropped) || asks(self.added()) {
            user + 1
        } else {
            // Only answers and tools follow the last question: what stands between it and the last answer is as it was.
            shared.iter().rposition(|m| m.role == Role::Assistant).filter(|place| *place > user).unwrap_or(user + 1)
        };
        let chosen = (0..leading).chain([user]).chain(from..self.shared);
        let bytes = |place: usize| shared[place].end - place.checked_sub(1).map_or(0, |before| shared[before].end);
        let total = shared.last()?.end;
        let chosen: Vec<u32> = chosen.map(|place| place as u32).collect();
        let excerpt: usize = chosen.iter().map(|place| bytes(*place as usize)).sum();
        let ends = [self.dropped, self.added()].map(|end| end.last().map_or(0, |last| last.end.saturating_sub(total)));
        let messages = chosen.len() + self.dropped.len().max(self.added().len());
        if excerpt + ends[0].max(ends[1]) > EXCERPT_BYTES_MAX || messages > self.template.messages_in_place() {
            return None;
        }
        (chosen.len() * 2 <= shared.len() && excerpt * 2 <= total || chosen.len() * 4 <= shared.len()).then_some(chosen)
    }

    fn shape(&self, chosen: &[u32]) -> u64 {
        let mut hash = DefaultHasher::new();
        for messages in [self.dropped, self.added()] {
            messages.len().hash(&mut hash);
            messages.iter().for_each(|message| message.shape.hash(&mut hash));
        }
        for place in chosen {
            self.messages[*place as usize].shape.hash(&mut hash);
        }
        self.frame.shape().hash(&mut hash);
        hash.finish()
    }

    /// How many bytes of the old text stay, and what follows them.
    fn edit(&self, chosen: Vec<u32>) -> Option<(usize, String, Excerpt)> {
        let render = |end: &[Message]| {
            let before = chosen.iter().map(|place| &self.messages[*place as usize]);
            let values: Vec<Value> = before.chain(end).map(|message| message.value.clone()).collect();
            self.frame.render_as_they_stand(values, self.template).ok()
        };
        let rendered;
        let old = match &self.excerpt {
            Some(excerpt) if excerpt.chosen == chosen => &excerpt.text,
            _ => {
                rendered = render(self.dropped)?;
                &rendered
            }
        };
        let new = render(self.added())?;
        let same = old.floor_char_boundary(common_prefix(old.as_bytes(), new.as_bytes()));
        let agreed = old.get(old.floor_char_boundary(same.saturating_sub(SHARED_BYTES_MIN))..)?;
        if !self.text.ends_with(agreed) {
            return None;
        }
        let keep = self.text.len() - (old.len() - same);
        Some((keep, new[same..].to_owned(), Excerpt { chosen, text: new }))
    }
}
