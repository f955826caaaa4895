//! Who holds the management plane's connections, and who gives one up when all are taken.
//!
//! **Invariant.** A connection whose request is worked on is never ended for another. One that keeps the gateway waiting
//! (for a head, a body, the next request, or for room to write) or whose request waits for others to end is, where there
//! is no place left: first of those addresses that hold most, and of these the one that has kept it waiting longest. So
//! whoever opens connections and says nothing shuts out nobody but themselves.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::time::{Instant, timeout};

/// How long a connection that was told to end is waited for before another is told, too.
const LOOK_AGAIN: Duration = Duration::from_millis(50);

/// How long a connection may keep the gateway waiting.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// From the connection, or the first byte of a further request, to the end of its head; TLS's greeting included.
    /// Then it is told so (408), where it said anything, and ended.
    pub(super) head: Duration,
    /// From the end of the head to that of the body. Beyond it: 408, and the end.
    pub(super) body: Duration,
    /// Without a further request, or without taking anything of an answer. Then it is ended.
    pub(super) idle: Duration,
}

/// What a connection's next step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// The client sends a head, or TLS's greeting.
    Head,
    /// The client sends a body.
    Body,
    /// The request waits until others of its kind are done.
    Queue,
    /// The gateway works out an answer.
    Work,
    /// The client takes nothing of the answer just now.
    Stuck,
    /// The client took what was written. Whether that was all, it need not say anything more.
    Idle,
}

impl Turn {
    fn keeps_waiting(self) -> bool {
        self != Turn::Work
    }

    /// How long the connection itself lets it last; a body's time, and that in a queue, is watched by whoever waits.
    fn limit(self, limits: &Limits) -> Option<Duration> {
        match self {
            Turn::Head => Some(limits.head),
            Turn::Body | Turn::Queue | Turn::Work => None,
            Turn::Stuck | Turn::Idle => Some(limits.idle),
        }
    }
}

/// The places of one listener.
#[derive(Clone, Debug)]
pub(super) struct Places {
    room: Arc<Semaphore>,
    held: Arc<Mutex<Vec<Arc<Place>>>>,
    limits: Limits,
}

/// The place of one connection.
#[derive(Debug)]
pub(super) struct Place {
    /// Whose it is: an address, or of IPv6 the network that one host commonly has to itself.
    owner: IpAddr,
    limits: Limits,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    turn: Turn,
    since: Instant,
    /// Tells the connection to end; taken once.
    end: Option<oneshot::Sender<()>>,
}

/// A place and what comes with it, given back when dropped.
#[derive(Debug)]
pub(super) struct Held {
    pub(super) place: Arc<Place>,
    /// Resolves when the place is wanted for another.
    pub(super) ended: oneshot::Receiver<()>,
    places: Places,
    _room: Option<OwnedSemaphorePermit>,
}

impl Places {
    pub(super) fn new(places_max: usize, limits: Limits) -> Self {
        Places { room: Arc::new(Semaphore::new(places_max)), held: Arc::default(), limits }
    }

    /// A place for a connection from `peer`, another's where none is left; waits where nobody keeps the gateway waiting.
    pub(super) async fn take(&self, peer: IpAddr) -> Held {
        let room = loop {
            if let Ok(room) = Arc::clone(&self.room).try_acquire_owned() {
                break Some(room);
            }
            self.end_one();
            // The semaphore is never closed; were it, connections would only go uncounted.
            if let Ok(room) = timeout(LOOK_AGAIN, Arc::clone(&self.room).acquire_owned()).await {
                break room.ok();
            }
        };
        let (end, ended) = oneshot::channel();
        let state = State { turn: Turn::Head, since: Instant::now(), end: Some(end) };
        let place = Arc::new(Place { owner: owner(peer), limits: self.limits, state: Mutex::new(state) });
        self.held().push(Arc::clone(&place));
        Held { place, ended, places: self.clone(), _room: room }
    }

    /// Tells a connection to end, if there is one that may be told.
    fn end_one(&self) {
        let held = self.held();
        let mut of_owner: HashMap<IpAddr, usize> = HashMap::new();
        held.iter().for_each(|place| *of_owner.entry(place.owner).or_default() += 1);
        let waits = |place: &&Arc<Place>| {
            let state = place.state();
            (state.turn.keeps_waiting() && state.end.is_some()).then_some(state.since)
        };
        let worth = |place: &&Arc<Place>| waits(place).map(|since| (of_owner[&place.owner], std::cmp::Reverse(since)));
        let told = held.iter().filter_map(|place| Some((worth(&place)?, place))).max_by_key(|(worth, _)| *worth);
        if let Some(end) = told.and_then(|(_, place)| place.state().end.take()) {
            // One that has ended already needs not be told.
            let _ = end.send(());
        }
    }

    /// How many are taken.
    #[cfg(test)]
    pub(super) fn count(&self) -> usize {
        self.held().len()
    }

    fn held(&self) -> MutexGuard<'_, Vec<Arc<Place>>> {
        // A list that is pushed to and filtered: whole at any time.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.places.held().retain(|place| !Arc::ptr_eq(place, &self.place));
    }
}

impl Place {
    pub(super) fn turn(&self) -> Turn {
        self.state().turn
    }

    /// Notes whose turn it is; the same turn again goes on from when it began.
    pub(super) fn now(&self, turn: Turn) {
        let mut state = self.state();
        if state.turn != turn {
            (state.turn, state.since) = (turn, Instant::now());
        }
    }

    /// Notes that the client took a part of its answer; what is said before its body came (100 Continue) is none.
    pub(super) fn took(&self) {
        let mut state = self.state();
        if state.turn != Turn::Body {
            (state.turn, state.since) = (Turn::Idle, Instant::now());
        }
    }

    /// Notes that the client takes nothing of what is written.
    pub(super) fn stuck(&self) {
        if self.turn() != Turn::Body {
            self.now(Turn::Stuck);
        }
    }

    /// When the connection has kept the gateway waiting for too long.
    pub(super) fn deadline(&self) -> Option<Instant> {
        let state = self.state();
        state.turn.limit(&self.limits).map(|limit| state.since + limit)
    }

    /// Waits for a body; none where it took too long.
    pub(super) async fn body<T>(&self, body: impl Future<Output = T>) -> Option<T> {
        self.now(Turn::Body);
        let body = timeout(self.limits.body, body).await;
        self.now(Turn::Work);
        body.ok()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Three values that are read and written under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn owner(peer: IpAddr) -> IpAddr {
    match peer.to_canonical() {
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
        address @ IpAddr::V4(_) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: Limits =
        Limits { head: Duration::from_secs(1), body: Duration::from_secs(1), idle: Duration::from_secs(1) };
    const PATIENCE: Duration = Duration::from_secs(20);

    fn address(text: &str) -> IpAddr {
        text.parse().expect("an address")
    }

    /// The place that was told to end when one from `peer` was taken.
    async fn told(places: &Places, held: &mut Vec<Held>, peer: &str) -> Option<usize> {
        let taken = places.take(address(peer));
        tokio::pin!(taken);
        // The one that is told gives its place up, as its connection does.
        assert!(timeout(Duration::from_millis(1), &mut taken).await.is_err(), "there is no room");
        let at = held.iter_mut().position(|held| held.ended.try_recv().is_ok())?;
        drop(held.remove(at));
        held.push(timeout(PATIENCE, taken).await.expect("there is room"));
        Some(at)
    }

    #[tokio::test]
    async fn those_who_hold_most_give_up_the_one_that_has_waited_longest() {
        let places = Places::new(4, LIMITS);
        let mut held = Vec::new();
        for peer in ["10.0.0.1", "10.0.0.2", "10.0.0.2", "10.0.0.2"] {
            held.push(places.take(address(peer)).await);
        }
        held[1].place.now(Turn::Work);
        // The first is the oldest, and alone; the second is worked on.
        assert_eq!(told(&places, &mut held, "10.0.0.3").await, Some(2));
        // Now the first and the newest are alone as the worked on one is not.
        assert_eq!(told(&places, &mut held, "10.0.0.3").await, Some(2));
    }

    #[tokio::test]
    async fn a_request_that_is_worked_on_is_waited_for() {
        let places = Places::new(2, LIMITS);
        let mut held = vec![places.take(address("::1")).await, places.take(address("::1")).await];
        held[0].place.now(Turn::Work);
        held[1].place.now(Turn::Work);
        assert_eq!(told(&places, &mut held, "::1").await, None);
        held[1].place.took();
        assert_eq!(told(&places, &mut held, "::1").await, Some(1));
    }

    #[test]
    fn the_addresses_of_one_network_are_one_owner() {
        assert_eq!(owner(address("2001:db8::1")), owner(address("2001:db8::ffff:2")));
        assert_ne!(owner(address("2001:db8::1")), owner(address("2001:db8:0:1::1")));
        assert_eq!(owner(address("::ffff:10.0.0.1")), address("10.0.0.1"));
        assert_ne!(owner(address("10.0.0.1")), owner(address("10.0.0.2")));
    }
}
