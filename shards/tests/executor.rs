//! Giving way, cancelling and panics, on both drivers.

mod support;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::Poll;
use std::time::{Duration, Instant};

use monoio::io::{AsyncReadRent, AsyncWriteRentExt, Splitable};
use shards::executor::aside::{Busy, WAITING_MAX};
use shards::executor::carry::{CARRIED_BYTES_MAX, READ_BYTES_MAX, SHORT_BYTES_MAX};
use shards::executor::{self, Aside, End, Meter, ReadAhead, Ring, Rung, Ticket};
use support::{PATIENCE, RUNGS};

/// Runs a future as a shard would, on a thread of its own, and returns what its executor saw.
fn on_ring<F, T>(rung: Rung, main: impl FnOnce() -> F + Send + 'static) -> (T, Arc<Meter>)
where
    F: Future<Output = T>,
    T: Send + 'static,
{
    std::thread::spawn(move || {
        let (mut ring, built, refusals) = Ring::build(rung, 256).expect("a driver");
        if built != rung {
            eprintln!("note: {rung:?} was refused, {built:?} is tested instead: {refusals:?}");
        }
        let meter = Arc::new(Meter::default());
        let output = executor::run(&mut ring, Arc::clone(&meter), main()).expect("no panic in the main future");
        std::mem::forget(ring);
        (output, meter)
    })
    .join()
    .expect("the thread ends")
}

fn pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let near = TcpStream::connect(listener.local_addr().expect("an address")).expect("a connection");
    let far = listener.accept().expect("a connection").0;
    near.set_nodelay(true).expect("a socket option");
    far.set_nodelay(true).expect("a socket option");
    (near, far)
}

fn on_driver(stream: TcpStream, rung: Rung) -> monoio::net::TcpStream {
    stream.set_nonblocking(rung == Rung::Epoll).expect("a socket option");
    monoio::net::TcpStream::from_std(stream).expect("a stream")
}

fn spin(time: Duration) {
    let start = Instant::now();
    while start.elapsed() < time {
        std::hint::spin_loop();
    }
}

#[test]
fn ten_thousand_cancels_raced_against_arriving_bytes_lose_none() {
    const CANCELS: usize = 10_000;
    for rung in RUNGS {
        let (near, mut far) = pair();
        // Writes numbered words until it is told to stop, by the end of the other side.
        let writer = std::thread::spawn(move || {
            let mut written = 0_u32;
            while far.write_all(&written.to_le_bytes()).is_ok() {
                written += 1;
                if written.is_multiple_of(3) {
                    std::thread::yield_now();
                }
            }
        });
        let ((received, cancels, with_bytes), _) = on_ring(rung, move || async move {
            let (read, write) = on_driver(near, rung).into_split();
            let mut reader = ReadAhead::new(read, usize::MAX);
            let (mut received, mut cancels, mut with_bytes) = (Vec::new(), 0, 0);
            while cancels < CANCELS {
                // A read is begun and, unless it is done at once, taken back.
                let filled = poll_fn(|context| Poll::Ready(reader.poll_fill(context).is_ready())).await;
                if !filled {
                    if cancels % 16 == 0 {
                        monoio::time::sleep(Duration::ZERO).await;
                    }
                    with_bytes += usize::from(reader.cancel().await.expect("the writer goes on") > 0);
                    cancels += 1;
                }
                let mut bytes = reader.bytes();
                received.extend_from_slice(&bytes);
                bytes.clear();
                reader.put_back(bytes);
            }
            drop((reader, write));
            monoio::time::sleep(Duration::from_millis(1)).await;
            (received, cancels, with_bytes)
        });
        writer.join().expect("the writer ends with the connection");
        let words = received.chunks_exact(4).map(|word| u32::from_le_bytes(word.try_into().expect("four bytes")));
        assert!(words.clone().enumerate().all(|(index, word)| index as u32 == word), "{rung:?}: bytes were lost");
        eprintln!(
            "{rung:?}: {cancels} cancels, {with_bytes} of which found bytes; {} bytes, none lost",
            received.len()
        );
        assert!(words.len() > 100, "{rung:?}: bytes arrived all the while");
    }
}

#[test]
fn the_end_of_a_connection_is_told_and_told_again() {
    for rung in RUNGS {
        let (near, mut far) = pair();
        far.write_all(b"last").expect("sent");
        drop(far);
        on_ring(rung, move || async move {
            let (read, _write) = on_driver(near, rung).into_split();
            let mut reader = ReadAhead::new(read, 100);
            assert_eq!(poll_fn(|context| reader.poll_watch(context)).await, End::Closed);
            assert_eq!(reader.bytes(), b"last");
            assert_eq!(poll_fn(|context| reader.poll_fill(context)).await, Err(End::Closed));
            assert_eq!(reader.cancel().await, Err(End::Closed));
        });
    }
}

#[test]
fn a_watch_keeps_a_bounded_number_of_bytes() {
    for rung in RUNGS {
        let (near, mut far) = pair();
        let writer = std::thread::spawn(move || {
            far.write_all(&vec![7; 4_000_000]).expect("sent");
            far
        });
        on_ring(rung, move || async move {
            let (read, _write) = on_driver(near, rung).into_split();
            let mut reader = ReadAhead::new(read, 10_000);
            while reader.held() < 10_000 {
                poll_fn(|context| {
                    assert!(reader.poll_watch(context).is_pending());
                    Poll::Ready(())
                })
                .await;
                executor::turn().await;
            }
            // Full: nothing more is read, however often it is asked.
            let held = reader.held();
            for _ in 0..10 {
                poll_fn(|context| Poll::Ready(reader.poll_watch(context).is_pending())).await;
                executor::turn().await;
            }
            assert_eq!(reader.held(), held);
            assert!(held < 100_000);
            let mut total = 0;
            while total < 4_000_000 {
                if reader.held() == 0 {
                    poll_fn(|context| reader.poll_fill(context)).await.expect("bytes");
                }
                let mut bytes = reader.bytes();
                total += bytes.len();
                bytes.clear();
                reader.put_back(bytes);
            }
        });
        writer.join().expect("the writer ends");
    }
}

/// Four slicers of 60 slices of 500 µs, an echo connection and a 5 ms timer.
#[test]
fn between_any_two_slices_the_driver_is_visited_and_others_are_served() {
    for rung in RUNGS {
        let (near, mut far) = pair();
        far.set_read_timeout(Some(PATIENCE)).expect("a time-out");
        let hang_up = far.try_clone().expect("a handle");
        let echo = std::thread::spawn(move || {
            let mut echoes = 0;
            let mut byte = [1];
            while far.write_all(&byte).is_ok() && matches!(far.read(&mut byte), Ok(1)) {
                echoes += 1;
            }
            echoes
        });
        let ((slices, unvisited, ticks), meter) = on_ring(rung, move || async move {
            let ticket = Ticket::new();
            let left = Rc::new(Cell::new(4));
            let last_visit = Rc::new(Cell::new(u64::MAX));
            let (slices, unvisited) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(0)));
            for _ in 0..4 {
                let (ticket, left, last_visit) = (ticket.clone(), Rc::clone(&left), Rc::clone(&last_visit));
                let (slices, unvisited) = (Rc::clone(&slices), Rc::clone(&unvisited));
                executor::spawn(async move {
                    // The ticket is given back now and then, so that slicers also follow each other directly.
                    for _ in 0..6 {
                        let guard = ticket.take().await;
                        for _ in 0..10 {
                            if last_visit.replace(executor::visits()) == executor::visits() {
                                unvisited.set(unvisited.get() + 1);
                            }
                            spin(Duration::from_micros(500));
                            slices.set(slices.get() + 1);
                            guard.breathe().await;
                        }
                    }
                    left.set(left.get() - 1);
                });
            }
            let mut stream = on_driver(near, rung);
            executor::spawn(async move {
                let mut byte = vec![0];
                loop {
                    let result;
                    (result, byte) = stream.read(byte).await;
                    if !matches!(result, Ok(1)) || stream.write_all(byte.clone()).await.0.is_err() {
                        return;
                    }
                }
            });
            let mut ticks = 0;
            while left.get() > 0 {
                monoio::time::sleep(Duration::from_millis(5)).await;
                ticks += 1;
            }
            (slices.get(), unvisited.get(), ticks)
        });
        hang_up.shutdown(std::net::Shutdown::Both).expect("still connected");
        let echoes = echo.join().expect("the echo ends");
        eprintln!(
            "{rung:?}: {slices} slices, {unvisited} without a visit before; {echoes} echoes, {ticks} ticks; \
             gap p50 ≤ {} µs, longest {} µs",
            meter.gap_us_at(0.5),
            meter.gap_max_ns.load(Ordering::Relaxed) / 1000
        );
        assert_eq!((slices, unvisited), (240, 0), "{rung:?}");
        // The slices take 120 ms at least; what starves gets nowhere near these.
        assert!(echoes >= 20 && ticks >= 5, "{rung:?}: {echoes} echoes, {ticks} ticks");
    }
}

#[test]
fn a_ticket_goes_round_in_order_and_survives_those_who_stop_waiting() {
    for rung in RUNGS {
        on_ring(rung, move || async move {
            let ticket = Ticket::new();
            let order = Rc::new(RefCell::new(Vec::new()));
            let first = ticket.take().await;
            for number in 0..4 {
                let (ticket, order) = (ticket.clone(), Rc::clone(&order));
                executor::spawn(async move {
                    let wait = ticket.take();
                    if number == 1 {
                        // Waits for a moment and gives up.
                        let given_up = monoio::time::timeout(Duration::from_millis(1), wait).await;
                        assert!(given_up.is_err());
                        return;
                    }
                    let _guard = wait.await;
                    order.borrow_mut().push(number);
                });
            }
            // Four begin to wait, one gives up.
            while ticket.waiting() < 4 {
                executor::turn().await;
            }
            while ticket.waiting() > 3 {
                executor::turn().await;
            }
            drop(first);
            while order.borrow().len() < 3 {
                executor::turn().await;
            }
            assert_eq!(*order.borrow(), [0, 2, 3]);
            let _again = ticket.take().await;
        });
    }
}

#[test]
fn what_many_carry_at_once_is_spread_over_visits_in_order() {
    for rung in RUNGS {
        on_ring(rung, move || async move {
            let carried = Rc::new(RefCell::new(Vec::new()));
            // Half a visit each, one that is longer than any visit's share, and one that stops waiting.
            let lengths = [CARRIED_BYTES_MAX / 2, 2 * CARRIED_BYTES_MAX, CARRIED_BYTES_MAX / 2].repeat(3);
            for (number, bytes) in lengths.iter().copied().enumerate() {
                let carried = Rc::clone(&carried);
                executor::spawn(async move {
                    let wait = executor::carry(bytes);
                    if number == 4 {
                        let _given_up = monoio::time::timeout(Duration::ZERO, wait).await;
                        return;
                    }
                    wait.await;
                    carried.borrow_mut().push((number, executor::visits(), bytes));
                });
            }
            while carried.borrow().len() + 1 < lengths.len() {
                executor::turn().await;
            }
            let carried = carried.take();
            assert!(carried.iter().map(|(number, ..)| number).is_sorted(), "{rung:?}: {carried:?}");
            for visit in carried.chunk_by(|one, other| one.1 == other.1) {
                let bytes: usize = visit.iter().map(|(.., bytes)| bytes).sum();
                assert!(visit.len() == 1 || bytes <= CARRIED_BYTES_MAX, "{rung:?}: {carried:?}");
            }
            // What is short is not counted, however often.
            let visit = executor::visits();
            for _ in 0..100 {
                executor::carry(SHORT_BYTES_MAX).await;
            }
            assert!(executor::visits() - visit < 10, "{rung:?}");
        });
    }
}

#[test]
fn one_read_takes_no_more_than_its_share_however_much_room_there_is() {
    for rung in RUNGS {
        let (near, mut far) = pair();
        let writer = std::thread::spawn(move || {
            let sent = vec![7; 4 * READ_BYTES_MAX];
            far.write_all(&sent).expect("sent");
        });
        on_ring(rung, move || async move {
            let (read, _write) = on_driver(near, rung).into_split();
            let mut reader = ReadAhead::new(read, usize::MAX);
            reader.put_back(Vec::with_capacity(8 * READ_BYTES_MAX));
            let mut all = 0;
            while all < 4 * READ_BYTES_MAX {
                let read = poll_fn(|context| reader.poll_fill(context)).await.expect("bytes");
                assert!(read <= READ_BYTES_MAX, "{rung:?}: {read}");
                all += read;
            }
        });
        writer.join().expect("all is sent");
    }
}

#[test]
fn a_panic_costs_one_task() {
    for rung in RUNGS {
        let ((), meter) = on_ring(rung, || async {
            let alive = Rc::new(Cell::new(0));
            for number in 0..10 {
                let alive = Rc::clone(&alive);
                executor::spawn(async move {
                    executor::turn().await;
                    assert!(number % 2 == 0, "odd tasks panic, as they should in this test");
                    executor::turn().await;
                    alive.set(alive.get() + 1);
                });
            }
            while alive.get() < 5 {
                executor::turn().await;
            }
        });
        assert_eq!(meter.panics.load(Ordering::Relaxed), 5, "{rung:?}");
        assert!(meter.visits.load(Ordering::Relaxed) > 0);
    }
}

#[test]
fn a_panic_of_the_main_future_is_reported() {
    std::thread::spawn(|| {
        let (mut ring, _, _) = Ring::build(Rung::Epoll, 256).expect("a driver");
        let ended = executor::run(&mut ring, Arc::default(), async { panic!("as it should in this test") });
        assert!(ended.is_err());
        std::mem::forget(ring);
    })
    .join()
    .expect("the panic was caught");
}

#[test]
fn work_aside_is_done_or_refused_and_a_panic_in_it_is_told() {
    for rung in RUNGS {
        let aside = Aside::start().expect("a thread");
        on_ring(rung, move || async move {
            assert_eq!(aside.run(|| 6 * 7).await, Ok(42));
            let panicking = || -> u32 { panic!("one piece of work") };
            assert_eq!(aside.run(panicking).await, Err(Busy));
            let (open, gate) = std::sync::mpsc::channel::<()>();
            let blocked = aside.clone();
            executor::spawn(async move {
                assert!(blocked.run(move || gate.recv().is_ok()).await.expect("the work is done"));
            });
            // The task above hands its work over before this one goes on.
            executor::turn().await;
            for _ in 0..=WAITING_MAX {
                aside.discard(());
            }
            assert_eq!(aside.run(|| 0).await, Err(Busy));
            open.send(()).expect("the work waits for it");
            let start = Instant::now();
            while aside.run(|| 1).await != Ok(1) {
                assert!(start.elapsed() < PATIENCE, "the queue empties");
                monoio::time::sleep(Duration::from_millis(1)).await;
            }
        });
    }
}
