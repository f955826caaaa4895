//! `GET /v1/models`: the union of the lists of a rule's healthy endpoints.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::Proxy;
use super::answer::{self, Refusal};
use super::ask::{self, Reply};
use super::client::Client;
use super::exchange::Next;
use super::routes::{LocalService, RequestView};
use crate::executor::{self, visit_ns};
use crate::service::count;

/// Longest wait for any endpoint's list. Then: the union is made without it.
const FETCH_TIMEOUT: Duration = Duration::from_secs(2);
/// Largest list of one endpoint, bytes. Beyond it: as if the endpoint had not answered.
const LIST_BYTES_MAX: usize = 1024 * 1024;
/// How long a union is used again for clients with the same credentials.
const KEPT: Duration = Duration::from_secs(1);

/// The last union of a service on a shard.
#[derive(Default)]
pub struct ModelsCache(RefCell<Option<Kept>>);

struct Kept {
    made_ns: u64,
    /// What the endpoints were shown; another client's list may differ.
    authorization: Vec<u8>,
    body: Rc<str>,
}

/// Whether the request asks for the list of models.
#[must_use]
pub fn is_asked(view: &RequestView<'_>) -> bool {
    view.path() == "/v1/models" && view.method() == "GET"
}

/// Answers with the union.
pub async fn answer(proxy: &Proxy, client: &mut Client, local: &LocalService, view: &RequestView<'_>) -> Next {
    let keep_alive = view.head.keep_alive && !proxy.draining.get();
    let stats = local.service.shared.stats_of(proxy.id);
    let authorization = view.head.authorization.map_or(&b""[..], |span| span.of(view.bytes));
    let made = match local.models.get(authorization) {
        Some(body) => Ok(body),
        None => match client.guard(None, collect(local, authorization)).await {
            Ok(made) => made,
            Err(_) => {
                count(&stats.client_gone);
                return Next::Close;
            }
        },
    };
    let (status, bytes) = match made {
        Ok(body) => {
            let bytes = answer::json(200, &body, keep_alive, false);
            local.models.put(authorization, body);
            (200, bytes)
        }
        Err(NoList::Nobody) => {
            count(&stats.no_healthy_backend);
            (503, Refusal::NoHealthyBackend.to_bytes(keep_alive, false))
        }
        Err(NoList::Refused(status)) => {
            let body = r#"{"error":"backend_refused","detail":"the endpoints refuse to list their models"}"#;
            (status, answer::json(status, body, keep_alive, false))
        }
        Err(NoList::Unreachable) => {
            let refusal = Refusal::BackendUnreachable("no endpoint listed its models in time");
            (502, refusal.to_bytes(keep_alive, false))
        }
    };
    count(&stats.responses[usize::from(status / 100).min(5)]);
    match client.write(bytes, 0, proxy.limits.write_timeout).await {
        Ok(_) if keep_alive => Next::Request,
        _ => Next::Close,
    }
}

/// Why there is no list.
enum NoList {
    /// No endpoint is up.
    Nobody,
    /// Those that answered refused, with this status.
    Refused(u16),
    /// None answered in time.
    Unreachable,
}

impl ModelsCache {
    fn get(&self, authorization: &[u8]) -> Option<Rc<str>> {
        let kept = self.0.borrow();
        let kept = kept.as_ref()?;
        let fresh = visit_ns().saturating_sub(kept.made_ns) < KEPT.as_nanos() as u64;
        (fresh && kept.authorization == authorization).then(|| Rc::clone(&kept.body))
    }

    fn put(&self, authorization: &[u8], body: Rc<str>) {
        let mut kept = self.0.borrow_mut();
        if kept.as_ref().is_some_and(|kept| Rc::ptr_eq(&kept.body, &body)) {
            return;
        }
        *kept = Some(Kept { made_ns: visit_ns(), authorization: authorization.to_vec(), body });
    }
}

/// The answers of all endpoints asked, in their order.
struct Answers {
    lists: RefCell<Vec<Option<Reply>>>,
    missing: Cell<usize>,
    waker: RefCell<Option<Waker>>,
}

async fn collect(local: &LocalService, authorization: &[u8]) -> Result<Rc<str>, NoList> {
    let endpoints = local.service.endpoints.iter().zip(&local.pools);
    let healthy: Vec<_> = endpoints.filter(|(endpoint, _)| endpoint.is_candidate()).collect();
    if healthy.is_empty() {
        return Err(NoList::Nobody);
    }
    let answers = Rc::new(Answers {
        lists: RefCell::new(healthy.iter().map(|_| None).collect()),
        missing: Cell::new(healthy.len()),
        waker: RefCell::default(),
    });
    for (place, (endpoint, pool)) in healthy.into_iter().enumerate() {
        let request = ask::request(endpoint.address, "/v1/models", authorization, None);
        let (answers, pool) = (Rc::clone(&answers), Rc::clone(pool));
        executor::spawn(async move {
            // The connection is the fetch's own and ends with it, so it may be dropped at any point.
            let fetched =
                monoio::time::timeout(FETCH_TIMEOUT, ask::ask(&pool, request, LIST_BYTES_MAX)).await.ok().flatten();
            answers.lists.borrow_mut()[place] = fetched;
            answers.missing.set(answers.missing.get() - 1);
            if answers.missing.get() == 0
                && let Some(waker) = answers.waker.take()
            {
                waker.wake();
            }
        });
    }
    poll_fn(|context| {
        if answers.missing.get() == 0 {
            return Poll::Ready(());
        }
        answers.waker.replace(Some(context.waker().clone()));
        Poll::Pending
    })
    .await;
    let lists = answers.lists.take();
    let fetched = || lists.iter().flatten();
    match union(fetched().filter(|fetched| fetched.status == 200).map(|fetched| &fetched.body[..])) {
        Some(body) => Ok(body.into()),
        None => Err(fetched().next().map_or(NoList::Unreachable, |fetched| NoList::Refused(fetched.status))),
    }
}

#[derive(Deserialize)]
struct List<'a> {
    #[serde(borrow)]
    data: Vec<&'a RawValue>,
}

#[derive(Deserialize)]
struct Entry {
    id: String,
}

#[derive(Serialize)]
struct Union<'a> {
    object: &'static str,
    data: Vec<&'a RawValue>,
}

/// The entries of all lists, each id once, as the first endpoint that has it spells it. None when no list is one.
fn union<'a>(lists: impl Iterator<Item = &'a [u8]>) -> Option<String> {
    let mut seen = HashSet::new();
    let mut any = false;
    let mut data = Vec::new();
    for list in lists {
        let Ok(list) = serde_json::from_slice::<List<'_>>(list) else { continue };
        any = true;
        for entry in list.data {
            if let Ok(Entry { id }) = serde_json::from_str(entry.get())
                && seen.insert(id)
            {
                data.push(entry);
            }
        }
    }
    any.then(|| serde_json::to_string(&Union { object: "list", data }).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_union_has_each_model_once_spelt_as_its_first_endpoint_does() {
        let lists: [&[u8]; 3] = [
            br#"{"object":"list","data":[{"id":"a","n":1.50},{"id":"b"}]}"#,
            b"<html>",
            br#"{"data":[{"id":"b","other":1},{"id":"c"},{"noid":1}]}"#,
        ];
        assert_eq!(
            union(lists.into_iter()).as_deref(),
            Some(r#"{"object":"list","data":[{"id":"a","n":1.50},{"id":"b"},{"id":"c"}]}"#)
        );
        assert_eq!(union([&b"x"[..]].into_iter()), None);
    }
}
