//! The built-in multi-turn chat.
//!
//! S conversations run at once. Each begins with one of P system prompts that many share, and grows turn by turn: a
//! request carries everything said before plus a new question. After T turns a conversation gives its place to a new
//! one; the places start at different turns, so the load is the same from the first second to the last. The
//! assistant's earlier replies are made from the seed too, not taken from the answers: a request then depends on its
//! number alone.
//!
//! A round is one turn of every conversation, in an order drawn anew each round, so that no conversation meets the
//! same endpoint of a round robin by arithmetic. Each half of the places is shuffled in itself: half a round lies
//! between two turns of a conversation, in which the first can be answered.

use serde_json::{Value, json};

use super::random::Random;
use super::{Request, chat_request, words};

/// Kinds of random texts and orders.
const SYSTEM: u64 = 1;
const USER: u64 = 2;
const ASSISTANT: u64 = 3;
const ORDER: u64 = 4;

/// The size of a multi-turn chat; sizes in tokens are rough.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChatShape {
    /// Model named in the requests.
    pub model: String,
    /// Conversations at once (S), at least 1.
    pub sessions: usize,
    /// Turns of a conversation (T), at least 1.
    pub turns: usize,
    /// Distinct system prompts (P), at least 1.
    pub system_prompts: usize,
    /// Tokens of a system prompt.
    pub system_tokens: usize,
    /// Tokens of a question.
    pub user_tokens: usize,
    /// Tokens of an earlier reply in the prompt.
    pub reply_tokens: usize,
    /// Tokens to generate.
    pub max_tokens: u32,
    /// Seed of all texts and orders.
    pub seed: u64,
}

/// Requests of a multi-turn chat.
#[derive(Clone, Debug)]
pub struct ChatWorkload {
    shape: ChatShape,
}

/// Which conversation a request belongs to, and which turn it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Place {
    conversation: u64,
    turn: usize,
}

impl ChatWorkload {
    /// The workload of this shape; counts of 0 are taken as 1.
    #[must_use]
    pub fn new(mut shape: ChatShape) -> Self {
        for count in [&mut shape.sessions, &mut shape.turns, &mut shape.system_prompts] {
            *count = (*count).max(1);
        }
        ChatWorkload { shape }
    }

    /// The request of this number.
    #[must_use]
    pub fn request(&self, number: usize) -> Request {
        let place = self.place(number);
        chat_request(&self.shape.model, &self.messages(place), self.shape.max_tokens)
    }

    pub(super) fn describe(&self) -> String {
        let s = &self.shape;
        format!(
            "multi-turn chat: {} conversations at once of {} turns, {} shared system prompts of ~{} tokens, ~{} + {} \
             tokens a turn, {} generated, seed {}",
            s.sessions, s.turns, s.system_prompts, s.system_tokens, s.user_tokens, s.reply_tokens, s.max_tokens, s.seed
        )
    }

    fn place(&self, number: usize) -> Place {
        let ChatShape { sessions, turns, seed, .. } = self.shape;
        let round = number / sessions;
        let mut order: Vec<usize> = (0..sessions).collect();
        let (first, second) = order.split_at_mut(sessions / 2);
        let mut random = Random::of(seed, ORDER, round as u64);
        random.shuffle(first);
        random.shuffle(second);
        let slot = order[number % sessions];
        let step = round + slot % turns;
        Place { conversation: (step / turns * sessions + slot) as u64, turn: step % turns }
    }

    fn messages(&self, place: Place) -> Value {
        let ChatShape { system_prompts, system_tokens, user_tokens, reply_tokens, seed, .. } = self.shape;
        let system = place.conversation % system_prompts as u64;
        let text = |kind, item, tokens| words::text(&mut Random::of(seed, kind, item), tokens);
        let mut messages = vec![json!({ "role": "system", "content": text(SYSTEM, system, system_tokens) })];
        for turn in 0..=place.turn {
            // Turns are far fewer than 2^16, conversations than 2^48.
            let item = place.conversation << 16 | turn as u64;
            messages.push(json!({ "role": "user", "content": text(USER, item, user_tokens) }));
            if turn < place.turn {
                messages.push(json!({ "role": "assistant", "content": text(ASSISTANT, item, reply_tokens) }));
            }
        }
        Value::Array(messages)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn workload(sessions: usize, turns: usize) -> ChatWorkload {
        ChatWorkload::new(ChatShape {
            model: "m".to_owned(),
            sessions,
            turns,
            system_prompts: 2,
            system_tokens: 30,
            user_tokens: 10,
            reply_tokens: 10,
            max_tokens: 4,
            seed: 42,
        })
    }

    #[test]
    fn a_number_and_a_seed_give_a_request_and_every_conversation_grows() {
        let chat = workload(6, 4);
        assert_eq!(chat.request(17), workload(6, 4).request(17));
        let mut seen: HashMap<u64, (usize, Vec<Value>)> = HashMap::new();
        for number in 0..6 * 12 {
            let place = chat.place(number);
            let Value::Array(messages) = chat.messages(place) else { unreachable!("messages are an array") };
            assert_eq!(messages.len(), 2 + 2 * place.turn);
            if let Some((turn, before)) = seen.insert(place.conversation, (place.turn, messages.clone())) {
                assert_eq!(place.turn, turn + 1, "turns come in order");
                assert_eq!(messages[..before.len()], before, "a turn repeats everything before it");
            }
        }
        assert!(seen.len() > 6 * 3, "conversations end and new ones begin");
    }

    #[test]
    fn every_round_has_one_turn_of_every_place_in_another_order() {
        let chat = workload(8, 100);
        let round = |number: usize| (0..8).map(|n| chat.place(number * 8 + n).conversation).collect::<Vec<_>>();
        assert_ne!(round(0), round(1));
        let (mut first, mut second) = (round(0), round(1));
        first.sort_unstable();
        second.sort_unstable();
        assert_eq!(first, second);
        let position =
            |number: usize| (0..8).map(|c| round(number).iter().position(|&x| x == c).unwrap()).collect::<Vec<_>>();
        for (before, after) in position(3).into_iter().zip(position(4)) {
            assert!(8 + after - before > 4, "half a round lies between two turns of a conversation");
        }
    }

    #[test]
    fn system_prompts_are_shared_and_distinct() {
        let chat = workload(4, 1);
        let system = |conversation| chat.messages(Place { conversation, turn: 0 })[0].clone();
        assert_eq!(system(0), system(2));
        assert_ne!(system(0), system(1));
    }
}
