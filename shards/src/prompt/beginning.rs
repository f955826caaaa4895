//! How a prompt begins, as it stands in the body: for selections that go by it, and for the tree of texts that were sent.

use serde::Deserialize;
use serde_json::value::RawValue;
use xxhash_rust::xxh64::Xxh64;

use super::body::BodyView;
use crate::service::PrefixHashing;

/// Bytes of it that count at level 3.
const MORE_BYTES: usize = 4096;
/// Bytes of a list of messages in which its first ones are looked for. Where they are longer, the list counts by its first
/// [`MORE_BYTES`].
const MESSAGES_BYTES_MAX: usize = 64 * 1024;

/// Bits of `chwbl_prefix_hash_flags`.
const WITH_ADAPTER: u8 = 1;
const WITH_SALT: u8 = 1 << 3;
const WITH_TOOLS: u8 = 1 << 4;
const WITH_SESSION: u8 = 1 << 5;
const WITH_TEMPLATE: u8 = 1 << 6;
const WITH_DOCUMENTS: u8 = 1 << 7;

#[derive(Deserialize)]
struct Message<'a> {
    #[serde(default)]
    role: &'a str,
    #[serde(borrow)]
    content: Option<&'a RawValue>,
}

impl<'a> BodyView<'a> {
    /// The prompt as it stands in the body: its messages, text or ids.
    #[must_use]
    pub fn raw_prompt(&self) -> Option<&'a str> {
        self.messages.or(self.prompt).or(self.input).or(self.text).or(self.input_ids)
    }

    /// A hash of how the prompt begins, XXH64; none where there is no prompt.
    ///
    /// Level 1 is the system prompt or, without one, the first bytes of what the user says (256 unless told); level 2 is both; level 3
    /// takes 4,096 of those bytes. Of the flags, those of images and audio change nothing: their bytes stand in messages
    /// that count as they are.
    #[must_use]
    pub fn prefix_hash(&self, hashing: PrefixHashing, session: Option<u64>) -> Option<u64> {
        let raw = self.raw_prompt()?;
        let (system, user) = match self.messages {
            Some(messages) => self.first_messages(messages),
            None => (self.instructions.or(self.system), Some(raw)),
        };
        let mut hash = Xxh64::new(0);
        // A part and its place: an absent part is another thing than an empty one.
        let mut part = |place: u8, bytes: &[u8]| {
            hash.update(&[place]);
            hash.update(&(bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        let system_counts = system.filter(|system| !system.is_empty());
        if let Some(system) = system_counts {
            part(0, system.as_bytes());
        }
        let user_bytes = match hashing.level {
            0 | 1 if system_counts.is_some() => 0,
            0..=2 => hashing.user_bytes.into(),
            _ => MORE_BYTES,
        };
        if user_bytes > 0 {
            let user = user.unwrap_or(raw).as_bytes();
            part(1, &user[..user.len().min(user_bytes)]);
        }
        let has = |flag: u8| hashing.flags & flag != 0;
        let members = [
            (WITH_ADAPTER, self.model.as_deref()),
            (WITH_SALT, self.cache_salt),
            (WITH_TOOLS, self.tools),
            (WITH_TEMPLATE, self.chat_template_kwargs),
            (WITH_DOCUMENTS, self.documents),
        ];
        for (flag, member) in members {
            if let Some(member) = member.filter(|_| has(flag)) {
                part(flag, member.as_bytes());
            }
        }
        if let Some(session) = session.filter(|_| has(WITH_SESSION)) {
            part(WITH_SESSION, &session.to_le_bytes());
        }
        Some(hash.digest())
    }

    /// The contents of the system message at the front and of the first other one.
    fn first_messages(&self, messages: &'a str) -> (Option<&'a str>, Option<&'a str>) {
        let system = self.system.or(self.instructions);
        if messages.len() > MESSAGES_BYTES_MAX {
            return (system, None);
        }
        let Ok(list) = serde_json::from_str::<Vec<Message<'a>>>(messages) else { return (system, None) };
        let content = |message: &Message<'a>| message.content.map(RawValue::get);
        let is_system = |message: &&Message<'a>| matches!(message.role, "system" | "developer");
        let own = list.first().filter(is_system).and_then(content);
        let user = list.iter().find(|message| !is_system(message)).and_then(content);
        (own.or(system), user)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(body: &str, level: u8, flags: u8, session: Option<u64>) -> Option<u64> {
        let view = BodyView::parse(body.as_bytes()).expect("an object");
        view.prefix_hash(PrefixHashing { level, flags, ..PrefixHashing::default() }, session)
    }

    fn chat(system: &str, user: &str) -> String {
        format!(
            r#"{{"model":"m","messages":[{{"role":"system","content":"{system}"}},{{"role":"user","content":"{user}"}}]}}"#
        )
    }

    #[test]
    fn a_system_prompt_is_the_beginning_and_more_counts_at_higher_levels() {
        let (a, b, other) = (chat("s", "one"), chat("s", "two"), chat("t", "one"));
        assert!(hash(&a, 1, 0, None).is_some());
        assert_eq!(hash(&a, 1, 0, None), hash(&b, 1, 0, None));
        assert_ne!(hash(&a, 1, 0, None), hash(&other, 1, 0, None));
        assert_ne!(hash(&a, 2, 0, None), hash(&b, 2, 0, None));
        let far = |end: &str| chat("s", &format!("{}{end}", "x".repeat(300)));
        assert_eq!(hash(&far("a"), 2, 0, None), hash(&far("b"), 2, 0, None), "beyond 256 bytes");
        assert_ne!(hash(&far("a"), 3, 0, None), hash(&far("b"), 3, 0, None));
    }

    #[test]
    fn without_a_system_prompt_the_first_bytes_of_the_user_or_the_text_count() {
        let text = |end: &str| format!(r#"{{"prompt":"{}{end}"}}"#, "x".repeat(300));
        assert_eq!(hash(&text("a"), 1, 0, None), hash(&text("b"), 1, 0, None));
        assert_ne!(hash(&text("a"), 1, 0, None), hash(r#"{"prompt":"y"}"#, 1, 0, None));
        let user = |user: &str| {
            format!(r#"{{"messages":[{{"role":"user","content":"{user}"}},{{"role":"user","content":"z"}}]}}"#)
        };
        assert_ne!(hash(&user("a"), 1, 0, None), hash(&user("b"), 1, 0, None));
        assert_eq!(hash(r#"{"model":"m"}"#, 1, 0, None), None);
        assert!(hash(r#"{"messages":"no list"}"#, 1, 0, None).is_some());
    }

    #[test]
    fn flags_take_more_of_the_request_into_account() {
        let salted = |salt: &str| format!(r#"{{"prompt":"p","cache_salt":"{salt}"}}"#);
        assert_eq!(hash(&salted("a"), 1, 0, None), hash(&salted("b"), 1, 0, None));
        assert_ne!(hash(&salted("a"), 1, WITH_SALT, None), hash(&salted("b"), 1, WITH_SALT, None));
        let plain = r#"{"prompt":"p"}"#;
        assert_eq!(hash(plain, 1, 0, Some(1)), hash(plain, 1, 0, Some(2)));
        assert_ne!(hash(plain, 1, WITH_SESSION, Some(1)), hash(plain, 1, WITH_SESSION, Some(2)));
    }
}
