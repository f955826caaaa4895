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

use super::fault::{Action, LegFault};
use super::reply::Answer;

/// Pieces that wait to be sent at most.
const PIECES_MAX: usize = 4;

const EVENTS: &str = "text/event-stream; charset=utf-8";
const JSON: &str = "application/json";

/// The answer as a response, with what goes wrong with it while it is written.
pub async fn respond(mut answer: Answer, stream: bool, fault: Option<LegFault>) -> Response {
    if stream {
        let body = match fault {
            None => Body::from_stream(answer.stream()),
            Some(fault) => play(answer.stream(), fault),
        };
        return ([(header::CONTENT_TYPE, EVENTS)], body).into_response();
    }
    match (answer.whole().await, fault) {
        (None, _) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
        (Some(body), None) => {
            answer.complete();
            ([(header::CONTENT_TYPE, JSON)], body).into_response()
        }
        (Some(body), Some(fault)) => {
            let length = body.len().to_string();
            let body =
                play(Halves { answer, rest: vec![body.slice(body.len() / 2..), body.slice(..body.len() / 2)] }, fault);
            ([(header::CONTENT_TYPE, JSON.to_owned()), (header::CONTENT_LENGTH, length)], body).into_response()
        }
    }
}

/// Pieces of an answer, which is completed or dies with its last.
trait Pieces: Send + Unpin + 'static {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>>;
    fn die(&mut self);
}

impl Pieces for super::reply::AnswerStream {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Option<Bytes>> {
        Pin::new(self).poll_next(context).map(|item| item.and_then(Result::ok))
    }

    fn die(&mut self) {
        self.answer().die();
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

    fn die(&mut self) {
        self.answer.die();
    }
}

/// Writes the pieces until it goes wrong. A client that leaves ends it.
fn play(mut pieces: impl Pieces, fault: LegFault) -> Body {
    let (sender, receiver) = mpsc::channel(PIECES_MAX);
    tokio::spawn(async move {
        let left = sender.clone();
        let writing = async {
            let mut written = 0;
            loop {
                if written >= fault.after && !strike(fault, &mut pieces, &sender).await {
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

/// Does what goes wrong; whether the answer goes on.
async fn strike(fault: LegFault, pieces: &mut impl Pieces, sender: &mpsc::Sender<io::Result<Bytes>>) -> bool {
    match fault.action {
        Action::Slow => tokio::time::sleep(Duration::from_millis(fault.ms)).await,
        Action::Hang => std::future::pending().await,
        Action::End => {
            pieces.die();
            return false;
        }
        Action::Die | Action::Status => {
            pieces.die();
            let _ = sender.send(Err(io::ErrorKind::ConnectionAborted.into())).await;
            return false;
        }
    }
    true
}

struct Received(mpsc::Receiver<io::Result<Bytes>>);

impl Stream for Received {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_recv(context)
    }
}
