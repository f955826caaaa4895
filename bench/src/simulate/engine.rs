//! A simulated engine in continuous time: one step after the other, each a piece of the first prompt in line and one
//! token of every answer that is being streamed.
//!
//! With `D` answers under way a step takes `step + D × step_per_answer` seconds, and with a prompt in line
//! `chunk / rate` more, for the `chunk − D` tokens of the prompt that it computes then. So prompts slow answers down, and
//! answers prompts. A token at place `p` of its prompt costs `1 + p / attention_tokens` times as much as the first: no
//! policy is told, nor of the service noise, a factor of its own for each request.
//!
//! Steps are not gone through one by one: between two events the speeds do not change, so each event's time is exact.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// How fast engines are.
#[derive(Clone, Copy, Debug)]
pub struct Speed {
    /// Seconds of an empty step.
    pub step: f64,
    /// Seconds that an answer adds to a step.
    pub step_per_answer: f64,
    /// Prompt tokens per second, of the first tokens of a prompt and with no answers under way.
    pub rate: f64,
    /// Tokens of a step.
    pub chunk: f64,
    /// Place of a prompt from which on a token costs twice as much as the first.
    pub attention_tokens: f64,
}

impl Speed {
    /// A model of about 8 billion weights on one large accelerator.
    pub const DEFAULT: Speed =
        Speed { step: 0.008, step_per_answer: 0.000_1, rate: 12_000.0, chunk: 2_048.0, attention_tokens: 80_000.0 };

    /// Tokens at the beginning of a prompt that cost as much as the prompt's tokens from `hit` to `end`.
    pub fn work(&self, hit: f64, end: f64) -> f64 {
        (end - hit) * (1.0 + (hit + end) / (2.0 * self.attention_tokens))
    }

    /// (prompt tokens per second, tokens per second of each answer).
    fn speeds(&self, answers: usize, prefilling: bool) -> (f64, f64) {
        let answers = answers as f64;
        let step = self.step + answers * self.step_per_answer;
        if !prefilling {
            return (0.0, 1.0 / step);
        }
        let step = step + self.chunk / self.rate;
        ((self.chunk - answers).max(self.chunk / 8.0) / step, 1.0 / step)
    }
}

/// What happened at an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Happened {
    /// The prompt of a request has been computed: its answer begins.
    FirstToken(u32),
    /// The answer of a request has ended.
    End(u32),
}

/// A request waiting for its prompt to be computed.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    request: u32,
    answer_tokens: f64,
}

/// One engine's line of prompts and the answers under way.
#[derive(Clone, Debug)]
pub struct Engine {
    speed: Speed,
    /// How many times as fast as `speed`.
    pub factor: f64,
    now: f64,
    /// The prompt being computed, and what is left of it.
    current: Option<(Waiting, f64)>,
    line: VecDeque<Waiting>,
    /// Tokens that an answer under way since the beginning of time would have.
    streamed: f64,
    /// By the value of `streamed` at which they end.
    answers: BinaryHeap<Reverse<(Ordered, u32)>>,
    /// Seconds in which a prompt was being computed.
    busy: f64,
}

/// A finite number in an order.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ordered(f64);

impl Eq for Ordered {}

impl PartialOrd for Ordered {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ordered {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

impl Engine {
    pub fn new(speed: Speed) -> Self {
        Engine {
            speed,
            factor: 1.0,
            now: 0.0,
            current: None,
            line: VecDeque::new(),
            streamed: 0.0,
            answers: BinaryHeap::new(),
            busy: 0.0,
        }
    }

    /// Puts a request in line; call [`Engine::advance`] to now before.
    pub fn enqueue(&mut self, request: u32, answer_tokens: u32) {
        self.line.push_back(Waiting { request, answer_tokens: f64::from(answer_tokens.max(1)) });
    }

    /// The request whose prompt is to be computed next; none while another's is.
    pub fn next_in_line(&self) -> Option<u32> {
        self.line.front().filter(|_| self.current.is_none()).map(|waiting| waiting.request)
    }

    /// Begins with the prompt of the first in line, which is so much work.
    pub fn begin(&mut self, work: f64) {
        debug_assert!(self.current.is_none(), "one prompt at a time");
        self.current = self.line.pop_front().map(|waiting| (waiting, work));
    }

    /// Requests whose answers have not ended.
    pub fn requests(&self) -> usize {
        usize::from(self.current.is_some()) + self.line.len() + self.answers.len()
    }

    /// Work left of the prompt being computed.
    pub fn work_left(&self) -> f64 {
        self.current.map_or(0.0, |(_, left)| left)
    }

    /// Seconds in which a prompt was being computed.
    pub fn busy(&self) -> f64 {
        self.busy
    }

    fn speeds(&self) -> (f64, f64) {
        let (prompt, answer) = self.speed.speeds(self.answers.len(), self.current.is_some());
        (prompt * self.factor, answer * self.factor)
    }

    /// When something happens next; none while there is nothing to do.
    pub fn next_event(&self) -> Option<f64> {
        let (prompt, answer) = self.speeds();
        let first = self.current.map(|(_, left)| self.now + left / prompt);
        let end = self.answers.peek().map(|Reverse((end, _))| self.now + (end.0 - self.streamed).max(0.0) / answer);
        first.into_iter().chain(end).reduce(f64::min)
    }

    /// Goes on to a time not beyond the next event.
    pub fn advance(&mut self, to: f64) {
        let (prompt, answer) = self.speeds();
        let time = (to - self.now).max(0.0);
        if let Some((_, left)) = &mut self.current {
            self.busy += time;
            *left = (*left - time * prompt).max(0.0);
        }
        if !self.answers.is_empty() {
            self.streamed += time * answer;
        }
        self.now = self.now.max(to);
    }

    /// What happens at the present moment, one thing at a time.
    pub fn happened(&mut self) -> Option<Happened> {
        const LITTLE: f64 = 1e-6;
        if let Some((waiting, left)) = self.current
            && left <= LITTLE
        {
            self.current = None;
            // The first token is there already.
            self.answers.push(Reverse((Ordered(self.streamed + waiting.answer_tokens - 1.0), waiting.request)));
            return Some(Happened::FirstToken(waiting.request));
        }
        if self.answers.peek().is_some_and(|Reverse((end, _))| end.0 - self.streamed <= LITTLE) {
            return self.answers.pop().map(|Reverse((_, request))| Happened::End(request));
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step of 0.1 s, 0.01 s more per answer; with a prompt 1 s more, for 100 tokens of it.
    const SPEED: Speed =
        Speed { step: 0.1, step_per_answer: 0.01, rate: 100.0, chunk: 100.0, attention_tokens: f64::INFINITY };

    fn next(engine: &mut Engine) -> (f64, Happened) {
        let at = engine.next_event().expect("something is under way");
        engine.advance(at);
        ((at * 1e6).round() / 1e6, engine.happened().expect("it happens then"))
    }

    #[test]
    fn a_prompt_and_its_answer_by_hand() {
        let mut engine = Engine::new(SPEED);
        engine.enqueue(7, 11);
        assert_eq!(engine.next_in_line(), Some(7));
        engine.begin(200.0);
        // Two steps of 1.1 s; then ten more tokens in steps of 0.11 s.
        assert_eq!(next(&mut engine), (2.2, Happened::FirstToken(7)));
        assert_eq!(next(&mut engine), (3.3, Happened::End(7)));
        assert_eq!((engine.next_event(), engine.requests()), (None, 0));
        assert!((engine.busy() - 2.2).abs() < 1e-9, "prompts alone count");
    }

    #[test]
    fn prompts_slow_answers_and_answers_slow_prompts() {
        let mut engine = Engine::new(SPEED);
        engine.enqueue(1, 3);
        engine.enqueue(2, 1);
        engine.begin(100.0);
        assert_eq!(engine.next_in_line(), None, "the first is being computed");
        assert_eq!(next(&mut engine), (1.1, Happened::FirstToken(1)));
        engine.begin(198.0);
        // Steps of 0.1 + 0.01 + 1 s, each 99 tokens of the prompt and one of the answer: both end after two.
        let mut events = [next(&mut engine), next(&mut engine)];
        events.sort_by_key(|(_, happened)| *happened == Happened::End(1));
        assert_eq!(events, [(3.32, Happened::FirstToken(2)), (3.32, Happened::End(1))]);
        assert_eq!(next(&mut engine), (3.32, Happened::End(2)), "of one token, which is there");
    }

    #[test]
    fn an_engine_that_is_twice_as_fast_takes_half_the_time_and_later_tokens_cost_more() {
        let mut engine = Engine::new(SPEED);
        engine.factor = 2.0;
        engine.enqueue(1, 1);
        engine.begin(100.0);
        assert_eq!(next(&mut engine).0, 0.55);
        let speed = Speed { attention_tokens: 1_000.0, ..SPEED };
        // From 1,000 to 3,000: 2,000 tokens at places of 2,000 on average, each three times the first.
        assert!((speed.work(1_000.0, 3_000.0) - 6_000.0).abs() < 1e-9);
    }
}
