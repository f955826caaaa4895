//! What goes wrong with requests for answers: an order for all of them, and orders for those of one mark.
//!
//! A request is under the order that stood when it arrived. One that hangs looks again whenever another is given in its
//! place: so a leg can be held at a phase, and what happens to it there be said once everything else is where it should be.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use tokio::sync::watch;

use super::fault::{LegFault, Phase};

/// The header that marks a request, for orders and for its place in the engine's account.
pub const MARK_HEADER: &str = "x-mark";

/// Marks with an order of their own at most. Those without a fault are forgotten first; beyond it orders for further
/// marks are refused.
const MARKS_MAX: usize = 4096;

/// The orders of an engine.
#[derive(Debug, Default)]
pub struct Orders {
    state: Mutex<State>,
    changed: watch::Sender<()>,
}

#[derive(Debug, Default)]
struct State {
    given: u64,
    /// By mark; that of all others stands under none.
    orders: HashMap<Option<String>, Order>,
}

#[derive(Clone, Copy, Debug)]
struct Order {
    /// Counted over all orders.
    number: u64,
    /// None: nothing goes wrong.
    fault: Option<LegFault>,
}

/// The order that one request is under.
#[derive(Debug)]
pub struct Ordered {
    key: Option<String>,
    order: Option<Order>,
    changes: watch::Receiver<()>,
}

impl Orders {
    /// Orders what goes wrong with requests of a mark, or with those that have no order of their own.
    ///
    /// # Errors
    /// There are orders for too many marks.
    pub fn give(&self, mark: Option<&str>, fault: Option<LegFault>) -> Result<(), String> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let key = mark.map(str::to_owned);
        if mark.is_some() && state.orders.len() >= MARKS_MAX && !state.orders.contains_key(&key) {
            state.orders.retain(|_, order| order.fault.is_some());
            if state.orders.len() >= MARKS_MAX {
                return Err(format!("there are orders for {MARKS_MAX} marks: take some back"));
            }
        }
        state.given += 1;
        let order = Order { number: state.given, fault };
        state.orders.insert(key, order);
        drop(state);
        self.changed.send_replace(());
        Ok(())
    }

    /// The order for a request that arrives now.
    pub fn take(&self, mark: Option<&str>) -> Ordered {
        let changes = self.changed.subscribe();
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let key = mark.map(str::to_owned).filter(|mark| state.orders.contains_key(&Some(mark.clone())));
        let Some(order) = state.orders.get_mut(&key) else { return Ordered { key, order: None, changes } };
        let taken = *order;
        if let Some(fault) = &mut order.fault {
            match fault.times {
                0 => {}
                1 => order.fault = None,
                _ => fault.times -= 1,
            }
        }
        Ordered { key, order: Some(taken), changes }
    }

    /// Waits until another order is given in the place of a request's own, which is under that one then.
    pub async fn next(&self, ordered: &mut Ordered) {
        loop {
            // The sender lives as long as this.
            let _ = ordered.changes.changed().await;
            let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let now = state.orders.get(&ordered.key).copied();
            if now.map(|order| order.number) != ordered.order.map(|order| order.number) {
                ordered.order = now;
                return;
            }
        }
    }
}

impl Ordered {
    /// What goes wrong at a phase.
    #[must_use]
    pub fn at(&self, phase: Phase) -> Option<LegFault> {
        self.order?.fault.filter(|fault| fault.phase == phase)
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::fault::Action;
    use super::*;

    #[test]
    fn a_mark_has_orders_of_its_own_and_times_run_out() {
        let orders = Orders::default();
        let once = LegFault { times: 1, ..LegFault::new(Action::Die, Phase::Arrival) };
        orders.give(None, Some(once)).expect("room");
        orders.give(Some("a"), Some(LegFault::new(Action::Hang, Phase::Computing))).expect("room");
        assert!(orders.take(Some("a")).at(Phase::Computing).is_some_and(|fault| fault.action == Action::Hang));
        assert!(orders.take(Some("b")).at(Phase::Arrival).is_some_and(|fault| fault.action == Action::Die));
        assert!(orders.take(None).at(Phase::Arrival).is_none(), "it was for one request");
        orders.give(Some("a"), None).expect("room");
        assert!(orders.take(Some("a")).at(Phase::Computing).is_none());
    }

    #[test]
    fn a_request_hears_of_the_next_order_for_its_mark_only() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
        runtime.block_on(async {
            let orders = Orders::default();
            let hang = LegFault { times: 1, ..LegFault::new(Action::Hang, Phase::Arrival) };
            orders.give(Some("a"), Some(hang)).expect("room");
            let mut held = orders.take(Some("a"));
            orders.give(Some("b"), None).expect("room");
            let waited = tokio::time::timeout(Duration::from_millis(1), orders.next(&mut held)).await;
            assert!(waited.is_err(), "that was not for it, and that its order is used up is none");
            orders.give(Some("a"), Some(LegFault::new(Action::Die, Phase::Arrival))).expect("room");
            orders.next(&mut held).await;
            assert!(held.at(Phase::Arrival).is_some_and(|fault| fault.action == Action::Die));
        });
    }

    #[test]
    fn there_is_an_end_of_marks() {
        let orders = Orders::default();
        let die = Some(LegFault::new(Action::Die, Phase::Arrival));
        (0..MARKS_MAX).for_each(|mark| orders.give(Some(&mark.to_string()), die).expect("room"));
        assert!(orders.give(Some("one more"), die).is_err());
        orders.give(Some("7"), None).expect("it has a place");
        orders.give(Some("one more"), die).expect("there is room again");
    }
}
