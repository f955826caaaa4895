//! Ids of chats that engines render in code, as an engine of the rule makes them.
//!
//! **Invariant.** Ids are used only for the very prompt they were asked for. A request waits for them for
//! [`PATIENCE`] at most, then it is routed without keys; what comes later still serves the next request like it. Of
//! equal questions one is under way at a time.

use std::cell::RefCell;
use std::collections::{HashMap, VecDeque};
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use super::ask::{self, Reply};
use super::routes::{LocalService, RequestView};
use crate::executor::{self, visit_ns};
use crate::ids::ServiceId;
use crate::prompt::Question;

/// Longest wait of a request for its ids.
const PATIENCE: Duration = Duration::from_millis(200);
/// Longest wait for an answer. Later ones are dropped, and the question may be asked again.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(5);
/// Largest answer, bytes: about a million ids. A larger one is none.
const ANSWER_BYTES_MAX: usize = 8 * 1024 * 1024;
/// Questions under way on a shard at once. Requests beyond them are routed without keys.
const UNDER_WAY_MAX: usize = 32;
/// Answers kept by a shard, bytes of their lists of ids; beyond them the oldest go.
const KEPT_BYTES_MAX: usize = 16 * 1024 * 1024;
/// How long an answer is used again: an engine may come back with other files.
const KEPT_TIME: Duration = Duration::from_secs(300);
/// How long a service is left alone whose engines do not have the path, or do not answer.
const REST: Duration = Duration::from_secs(10);
/// Bytes an answer costs beside its list, about.
const FIXED_BYTES: usize = 128;

/// What a shard has asked engines.
#[derive(Default)]
pub struct Asked(RefCell<Inner>);

#[derive(Default)]
struct Inner {
    /// By service and question.
    answers: HashMap<(ServiceId, u128), Answer>,
    /// Those that are kept, oldest first.
    kept: VecDeque<(ServiceId, u128)>,
    kept_bytes: usize,
    under_way: usize,
    /// Services that are left alone, and until when.
    resting: HashMap<ServiceId, u64>,
}

enum Answer {
    UnderWay(Rc<Waiting>),
    /// The list of ids after its bracket; none: the engine refused the request.
    Kept {
        list: Option<Rc<str>>,
        since_ns: u64,
    },
}

/// Requests that wait for one answer.
#[derive(Default)]
struct Waiting {
    /// Some once it is over.
    list: RefCell<Option<Option<Rc<str>>>>,
    wakers: RefCell<Vec<Waker>>,
}

/// What came of a question.
enum Outcome {
    List(Rc<str>),
    /// The engine refuses the request itself.
    Refused,
    /// The engine has no such path, or gives no answer in time.
    Silent,
}

impl Asked {
    /// The list of ids of a request's prompt, after its bracket; none if no engine tells it in time.
    pub async fn ids(
        self: &Rc<Self>,
        local: &LocalService,
        request: &RequestView<'_>,
        question: Question,
    ) -> Option<Rc<str>> {
        let waiting = match self.begin(local, request, question) {
            Begun::Known(list) => return list,
            Begun::Waiting(waiting) => waiting,
        };
        let told = poll_fn(|context| {
            if let Some(list) = &*waiting.list.borrow() {
                return Poll::Ready(list.clone());
            }
            let mut wakers = waiting.wakers.borrow_mut();
            if !wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                wakers.push(context.waker().clone());
            }
            Poll::Pending
        });
        monoio::time::timeout(PATIENCE, told).await.ok().flatten()
    }

    fn begin(self: &Rc<Self>, local: &LocalService, request: &RequestView<'_>, question: Question) -> Begun {
        let id = (local.service.id, question.id);
        let mut inner = self.0.borrow_mut();
        match inner.answers.get(&id) {
            Some(Answer::UnderWay(waiting)) => return Begun::Waiting(Rc::clone(waiting)),
            Some(Answer::Kept { list, since_ns }) if !is_over(*since_ns, KEPT_TIME) => {
                return Begun::Known(list.clone());
            }
            _ => {}
        }
        let resting = inner.resting.get(&id.0).is_some_and(|until_ns| visit_ns() < *until_ns);
        if resting || inner.under_way >= UNDER_WAY_MAX {
            return Begun::Known(None);
        }
        // The same question goes to the same engine, others to others.
        let candidates = || local.service.endpoints.iter().zip(&local.pools).filter(|(one, _)| one.is_candidate());
        let Some(place) = (question.id as usize).checked_rem(candidates().count()) else { return Begun::Known(None) };
        let Some((endpoint, pool)) = candidates().nth(place) else { return Begun::Known(None) };
        let authorization = request.head.authorization.map_or(&b""[..], |span| span.of(request.bytes));
        let asking = ask::request(endpoint.address, question.path, authorization, Some(request.body_bytes()));
        let waiting = Rc::<Waiting>::default();
        inner.forget(id);
        inner.answers.insert(id, Answer::UnderWay(Rc::clone(&waiting)));
        inner.under_way += 1;
        let (asked, pool) = (Rc::clone(self), Rc::clone(pool));
        executor::spawn(async move {
            let end = Ending { asked, id };
            let reply = monoio::time::timeout(ANSWER_TIMEOUT, ask::ask(&pool, asking, ANSWER_BYTES_MAX)).await;
            end.with(outcome(question, reply.ok().flatten()));
        });
        Begun::Waiting(waiting)
    }
}

enum Begun {
    Known(Option<Rc<str>>),
    Waiting(Rc<Waiting>),
}

fn outcome(question: Question, reply: Option<Reply>) -> Outcome {
    let Some(Reply { status, body }) = reply else { return Outcome::Silent };
    match (status, question.ids(&body)) {
        (200, Some(list)) => Outcome::List(list.into()),
        (400 | 413 | 422, _) => Outcome::Refused,
        _ => Outcome::Silent,
    }
}

fn is_over(since_ns: u64, time: Duration) -> bool {
    visit_ns().saturating_sub(since_ns) > time.as_nanos() as u64
}

/// A question under way; however its task ends, those who wait are told.
struct Ending {
    asked: Rc<Asked>,
    id: (ServiceId, u128),
}

impl Ending {
    fn with(self, outcome: Outcome) {
        self.asked.end(self.id, outcome);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.asked.end(self.id, Outcome::Silent);
    }
}

impl Asked {
    fn end(&self, id: (ServiceId, u128), outcome: Outcome) {
        let mut inner = self.0.borrow_mut();
        let Some(Answer::UnderWay(waiting)) = inner.answers.get(&id) else { return };
        let waiting = Rc::clone(waiting);
        inner.answers.remove(&id);
        inner.under_way -= 1;
        let list = match outcome {
            Outcome::List(list) => Some(list),
            Outcome::Refused => None,
            Outcome::Silent => {
                let now = visit_ns();
                // Here and not at removals: services that are gone stop resting too.
                inner.resting.retain(|_, until_ns| now < *until_ns);
                inner.resting.insert(id.0, now.saturating_add(REST.as_nanos() as u64));
                waiting.end(None);
                return;
            }
        };
        inner.keep(id, list.clone());
        waiting.end(list);
    }
}

impl Inner {
    fn keep(&mut self, id: (ServiceId, u128), list: Option<Rc<str>>) {
        self.kept_bytes += bytes_of(list.as_deref());
        self.answers.insert(id, Answer::Kept { list, since_ns: visit_ns() });
        self.kept.push_back(id);
        while self.kept_bytes > KEPT_BYTES_MAX {
            let Some(oldest) = self.kept.pop_front() else { break };
            self.drop_answer(oldest);
        }
    }

    fn forget(&mut self, id: (ServiceId, u128)) {
        if self.drop_answer(id) {
            self.kept.retain(|kept| *kept != id);
        }
    }

    /// Drops a kept answer; false if there is none.
    fn drop_answer(&mut self, id: (ServiceId, u128)) -> bool {
        let Some(Answer::Kept { list, .. }) = self.answers.get(&id) else { return false };
        self.kept_bytes -= bytes_of(list.as_deref());
        self.answers.remove(&id);
        true
    }
}

fn bytes_of(list: Option<&str>) -> usize {
    FIXED_BYTES + list.map_or(0, str::len)
}

impl Waiting {
    fn end(&self, list: Option<Rc<str>>) {
        self.list.replace(Some(list));
        for waker in self.wakers.take() {
            waker.wake();
        }
    }
}
