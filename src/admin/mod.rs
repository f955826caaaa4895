//! The management API on the control core, with the paths and shapes of the reference (`/netlox/v1/…`), and the
//! second listener with `/metrics`, `/healthz` and `/readyz` alone.
//!
//! Handlers read the supervisor's view and ask it for changes; they hold no state.

#![forbid(unsafe_code)]

mod accept;
mod answers;
mod contract;
mod inventory;
mod metrics;
mod metrics_pd;
mod parity;
mod rules;
mod status;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::{delete, get, post};
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;

use crate::rules::KvDefaults;
use crate::supervise::{BindError, Control};

pub(crate) use accept::CONNECTIONS_MAX;
pub(crate) use metrics::{Families, Labels};

/// Largest body of a request, bytes; 1,024 endpoints need a fifth of it. Beyond it: 413.
const BODY_BYTES_MAX: usize = 1 << 20;

/// What the handlers share.
#[derive(Clone, Debug)]
struct Context {
    control: Control,
    defaults: Arc<KvDefaults>,
    registry: Arc<Registry>,
}

impl Context {
    fn new(control: Control, defaults: KvDefaults) -> Self {
        let registry = Arc::new(metrics::registry(control.clone()));
        Context { control, defaults: Arc::new(defaults), registry }
    }
}

/// A listener of the management plane, not yet serving.
#[derive(Debug)]
pub struct Door {
    listener: TcpListener,
    address: SocketAddr,
}

impl Door {
    /// Takes the address.
    ///
    /// # Errors
    /// [`BindError`]: the address is busy or not this host's.
    pub async fn open(address: SocketAddr) -> Result<Self, BindError> {
        let error = |source| BindError { address, source };
        let listener = TcpListener::bind(address).await.map_err(error)?;
        let address = listener.local_addr().map_err(error)?;
        Ok(Door { listener, address })
    }

    /// Where it listens: with the real port where 0 was asked for.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Serves the management API until dropped.
    pub async fn serve_api(self, control: Control, defaults: KvDefaults) {
        serve(self.listener, api(Context::new(control, defaults))).await;
    }

    /// Serves metrics, liveness and readiness until dropped.
    pub async fn serve_metrics(self, control: Control) {
        serve(self.listener, metrics_only(Context::new(control, KvDefaults::default()))).await;
    }
}

async fn serve(listener: TcpListener, router: Router) {
    // axum's accept loop outlives every error of a single connection; it never returns.
    if let Err(error) = axum::serve(accept::Bounded::new(listener), router).await {
        tracing::error!(%error, "the management listener ended");
    }
}

const BASE: &str = "/netlox/v1";

fn api(context: Context) -> Router {
    let key = "externalipaddress/{ip}/port/{port}";
    let lb = "/config/loadbalancer";
    let routes = Router::new()
        .route(lb, post(rules::create).get(rules::list))
        .route(&format!("{lb}/all"), get(rules::list).delete(rules::delete_all))
        .route(&format!("{lb}/name/{{name}}"), delete(rules::delete_name))
        .route(&format!("{lb}/{key}/protocol/{{protocol}}"), delete(rules::delete_key))
        .route(&format!("{lb}/{key}/portmax/{{portmax}}/protocol/{{protocol}}"), delete(rules::delete_key))
        .route(&format!("{lb}/hosturl/{{host}}/{key}/protocol/{{protocol}}"), delete(rules::delete_key))
        .route(
            &format!("{lb}/hosturl/{{host}}/{key}/portmax/{{portmax}}/protocol/{{protocol}}"),
            delete(rules::delete_key),
        )
        .route("/config/ai/kv/contract", get(contract::report))
        .route("/config/ai/kv/inventory", get(inventory::dump))
        .route("/config/ai/kv/models", get(status::models))
        .route("/config/ai/kv/parity", get(parity::report))
        .route("/config/ai/kv/streams", get(status::streams))
        .route("/metrics", get(metrics::scrape))
        .route("/status/ready", get(status::ready))
        .route("/version", get(status::version));
    Router::new()
        .nest(BASE, routes)
        .fallback(answers::no_such_path)
        .method_not_allowed_fallback(answers::no_such_method)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .with_state(context)
}

fn metrics_only(context: Context) -> Router {
    Router::new()
        .route("/metrics", get(metrics::scrape))
        .route("/healthz", get(status::healthz))
        .route("/readyz", get(status::readyz))
        .fallback(answers::no_such_path)
        .method_not_allowed_fallback(answers::no_such_method)
        .with_state(context)
}

#[cfg(test)]
mod tests;
