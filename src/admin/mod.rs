//! The management API on the control core, with the paths and shapes of the reference (`/netlox/v1/…`), and the
//! second listener with `/metrics`, `/healthz` and `/readyz` alone.
//!
//! Handlers read the supervisor's view and ask it for changes; they hold no state.

#![forbid(unsafe_code)]

mod accept;
mod addresses;
mod answers;
mod ask;
mod contract;
mod explain;
mod guard;
mod hosts;
mod inventory;
mod metrics;
mod metrics_pd;
mod openapi;
mod parity;
mod places;
mod post;
mod process;
mod routes;
mod rule_path;
mod rules;
mod secrets;
mod settings;
mod snapshot;
mod status;
mod time;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::get;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio::sync::{Mutex, Semaphore};

use crate::access::Access;
use crate::logs::LogSwitch;
use crate::rules::KvDefaults;
use crate::supervise::{BindError, Control};

pub(crate) use accept::CONNECTIONS_MAX;
pub(crate) use metrics::{Families, Labels};

/// Largest body of a request, bytes; 1,024 endpoints need a fifth of it. Beyond it: 413.
const BODY_BYTES_MAX: usize = 1 << 20;
/// Largest snapshot that is restored, bytes. Beyond it: 413.
const SNAPSHOT_BYTES_MAX: usize = 64 << 20;

/// What the handlers share.
#[derive(Clone, Debug)]
pub struct Admin {
    control: Control,
    defaults: Arc<KvDefaults>,
    registry: Arc<Registry>,
    /// Who is let in; none = everybody.
    access: Option<Access>,
    log: LogSwitch,
    /// Held by one change of rules at a time, from what it is worked out from until it is in force.
    changes: Arc<Mutex<()>>,
    /// Room for dumps of inventories.
    dumps: Arc<Semaphore>,
    hosts: hosts::Hosts,
    shows_metrics: Arc<AtomicBool>,
    rates: Arc<guard::Rates>,
}

use Admin as Context;

impl Admin {
    /// A management plane over a supervisor's parts.
    #[must_use]
    pub fn new(control: Control, defaults: KvDefaults, access: Option<Access>, log: LogSwitch) -> Self {
        let registry = Arc::new(metrics::registry(control.clone()));
        Admin {
            control,
            defaults: Arc::new(defaults),
            registry,
            access,
            log,
            changes: Arc::default(),
            dumps: Arc::new(Semaphore::new(inventory::DUMPS_MAX)),
            hosts: hosts::Hosts::default(),
            shows_metrics: Arc::new(AtomicBool::new(true)),
            rates: Arc::default(),
        }
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
    pub async fn serve_api(self, admin: Admin) {
        let access = admin.access.clone();
        serve(self.listener, access, api(admin)).await;
    }

    /// Serves metrics, liveness and readiness until dropped: in clear, and to everybody.
    pub async fn serve_metrics(self, admin: Admin) {
        serve(self.listener, None, metrics_only(admin)).await;
    }
}

async fn serve(listener: TcpListener, access: Option<Access>, router: Router) {
    let listener = accept::Bounded::new(listener, access);
    // axum's accept loop outlives every error of a single connection; it never returns.
    if let Err(error) = axum::serve(listener, router.into_make_service_with_connect_info::<guard::Peer>()).await {
        tracing::error!(%error, "the management listener ended");
    }
}

const BASE: &str = "/netlox/v1";

fn api(context: Context) -> Router {
    let mut routes = Router::new();
    for operation in routes::operations() {
        routes = routes.route(operation.path, operation.route);
    }
    let guarded = axum::middleware::from_fn_with_state(context.clone(), guard::guard);
    Router::new()
        .nest(BASE, routes)
        .fallback(answers::no_such_path)
        .method_not_allowed_fallback(answers::no_such_method)
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(guarded)
        .layer(axum::middleware::from_fn(guard::heard))
        .with_state(context)
}

fn metrics_only(context: Context) -> Router {
    Router::new()
        .route("/metrics", get(metrics::scrape))
        .route("/healthz", get(status::healthz))
        .route("/readyz", get(status::readyz))
        .fallback(answers::no_such_path)
        .method_not_allowed_fallback(answers::no_such_method)
        .layer(axum::middleware::from_fn(guard::heard))
        .with_state(context)
}

#[cfg(test)]
mod tests;
