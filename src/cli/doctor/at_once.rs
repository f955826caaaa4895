//! Several futures at once, on one thread.

use std::future::poll_fn;
use std::pin::Pin;
use std::task::Poll;

/// What futures come to, in their order; at most `most` of them are under way at once.
pub(super) async fn at_once<F: Future>(futures: Vec<F>, most: usize) -> Vec<F::Output> {
    let mut waiting = futures.into_iter().enumerate();
    let mut running: Vec<(usize, Pin<Box<F>>)> = Vec::new();
    let mut done = Vec::new();
    poll_fn(|context| {
        loop {
            let room = most.max(1) - running.len();
            running.extend(waiting.by_ref().take(room).map(|(at, future)| (at, Box::pin(future))));
            let before = done.len();
            running.retain_mut(|(at, future)| match future.as_mut().poll(context) {
                Poll::Ready(result) => {
                    done.push((*at, result));
                    false
                }
                Poll::Pending => true,
            });
            if running.is_empty() && waiting.len() == 0 {
                return Poll::Ready(());
            }
            if done.len() == before {
                return Poll::Pending;
            }
        }
    })
    .await;
    done.sort_by_key(|(at, _)| *at);
    done.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use tokio::sync::Barrier;

    use super::*;

    #[tokio::test]
    async fn so_many_are_under_way_at_once_and_results_keep_their_order() {
        let (barrier, under_way) = (Barrier::new(3), Cell::new(0));
        let (barrier, under_way) = (&barrier, &under_way);
        let one = |number: usize| async move {
            under_way.set(under_way.get() + 1);
            assert!(under_way.get() <= 3);
            // Nobody passes before three are here.
            barrier.wait().await;
            under_way.set(under_way.get() - 1);
            number
        };
        assert_eq!(at_once((0..9).map(one).collect(), 3).await, (0..9).collect::<Vec<_>>());
        assert!(at_once(Vec::<std::future::Ready<()>>::new(), 3).await.is_empty());
    }
}
