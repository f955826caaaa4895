//! Answers that do not go by at once: pieces with pauses, and ends that come too early.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures_core::Stream;
use tokio::sync::mpsc;

use super::fault::{Action, Phase};
use super::orders::Ordered;
use super::reply::Answer;

/// Pieces that wait to be sent at most.
const PIECES_MAX: usize = 4;

const EVENTS: &str = "text/event-stream; charset=utf-8";
const JSON: &str = "application/json";

/// The answer as a response, with what goes wrong with it while it is written.
pub async fn respond(mut answer: Answer, stream: bool, ordered: Ordered) -> Response {
    let scripted = ordered.at(Phase::Answering).is_some();
    if stream {
        let body = match scripted {
            false => Body::from_stream(answer.stream()),
            true => play(answer.stream(), ordered),
        };
        return ([(header::CONTENT_TYPE, EVENTS)], body).into_response();
    }
    let Some(body) = answer.whole().await else { return StatusCode::INTERNAL_SERVER_ERROR.into_response() };
    if !scripted {
        answer.complete();
        return ([(header::CONTENT_TYPE, JSON)], body).into_response();
    }
    let length = body.len().to_string();
    let rest = vec![body.slice(body.len() / 2..), body.slice(..body.len() / 2)];
    let body = play(Halves { answer, rest }, ordered);
    ([(header::CONTENT_TYPE, JSON.to_owned()), (header::CONTENT_LENGTH, length)], body).into_response()
}

/// Pieces of an answer, which is completed or dies with its last.
trait Pieces: Send + Unpin + 'static {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>>;
    fn answer(&mut self) -> &mut Answer;
}

impl Pieces for super::reply::AnswerStream {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        Pin::new(self).poll_next(context).map(|item| item.and_then(Result::ok))
    }

    fn answer(&mut self) -> &mut Answer {
        Self::answer(self)
    }
}

/// A whole answer in two pieces, last first.
struct Halves {
    answer: Answer,
    rest: Vec<Bytes>,
}

impl Pieces for Halves {
    fn poll(&mut self, _: &mut Context<'_>) -> Poll<Option<Bytes>> {
        let next = self.rest.pop();
        if self.rest.is_empty() {
            // The length that was announced is reached with it: nobody asks whether there is more.
            self.answer.complete();
        }
        Poll::Ready(next)
    }

    fn answer(&mut self) -> &mut Answer {
        &mut self.answer
    }
}

/// Writes the pieces until it goes wrong. A client that leaves ends it.
fn play(mut pieces: impl Pieces, mut ordered: Ordered) -> Body {
    let (sender, receiver) = mpsc::channel(PIECES_MAX);
    tokio::spawn(async move {
        let left = sender.clone();
        let writing = async {
            let mut written = 0;
            loop {
                if !strike(&mut ordered, written, pieces.answer(), &sender).await {
                    return;
                }
                let Some(piece) = poll_fn(|context| pieces.poll(context)).await else { return };
                // Fails when the client has left: then nothing of this goes on.
                let _ = sender.send(Ok(piece)).await;
                written += 1;
            }
        };
        tokio::select! {
            biased;
            () = left.closed() => {}
            () = writing => {}
        }
    });
    Body::from_stream(Received(receiver))
}

/// Does what goes wrong after so many pieces; whether the answer goes on.
async fn strike(
    ordered: &mut Ordered,
    written: u64,
    answer: &mut Answer,
    sender: &mpsc::Sender<io::Result<Bytes>>,
) -> bool {
    loop {
        let Some(fault) = ordered.at(Phase::Answering).filter(|fault| written >= fault.after) else { return true };
        match fault.action {
            Action::Slow => {
                tokio::time::sleep(Duration::from_millis(fault.ms)).await;
                return true;
            }
            Action::Hang => answer.hold(ordered).await,
            Action::End => {
                answer.die();
                return false;
            }
            Action::Die | Action::Status => {
                answer.die();
                let _ = sender.send(Err(io::ErrorKind::ConnectionAborted.into())).await;
                return false;
            }
        }
    }
}

struct Received(mpsc::Receiver<io::Result<Bytes>>);

impl Stream for Received {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context)
    }
}
