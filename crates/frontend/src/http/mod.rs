//! The HTTP front end: `/metrics` for Prometheus, `/healthz` for health checks, `/slow` for slow operations.
//!
//! It runs on a thread of its own, off the data path: a scrape asks the node for a [`Snapshot`], which the node then sums
//! over its loops.

mod listener;
mod metrics;
mod page;
mod snapshot;

#[cfg(test)]
mod tests;

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::thread::JoinHandle;

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::{Json, Router, routing::get};
use tokio::sync::oneshot;

use self::listener::Bounded;
pub use metrics::render;
pub use page::Page;
pub use snapshot::{
    BorrowerSnapshot, FailureSnapshot, FrontendSnapshot, LendingSnapshot, MemoryUsage, NbdClientSnapshot, PeerSnapshot,
    Report, ShareSnapshot, SlowOperation, Snapshot, VolumeSnapshot, flush_failed,
};

/// The front end, open until [`HttpFrontend::close`] or drop.
#[derive(Debug)]
pub struct HttpFrontend {
    address: SocketAddr,
    stop: Option<oneshot::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl HttpFrontend {
    /// Listens at `address` and answers from a new thread whomever `admits` says yes to.
    ///
    /// # Errors
    /// The kernel's: `AddrInUse`, `PermissionDenied`, ...
    pub fn open(
        address: SocketAddr,
        report: Arc<dyn Report>,
        admits: impl Fn(SocketAddr) -> bool + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address)?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        let (stop, stopped) = oneshot::channel();
        let serve = move || {
            runtime.block_on(async {
                let listener = match tokio::net::TcpListener::from_std(listener) {
                    Ok(listener) => listener,
                    Err(error) => return tracing::error!(%error, "cannot start the HTTP server"),
                };
                // Not a graceful end: a scraper that keeps its connection must not keep the node.
                tokio::select! {
                    served = axum::serve(Bounded::new(listener, Box::new(admits)), router(report)) => {
                        tracing::error!(?served, "the HTTP server ended");
                    }
                    _ = stopped => {}
                }
            });
        };
        let thread = std::thread::Builder::new().name("byway-http".to_owned()).spawn(serve)?;
        Ok(Self { address, stop: Some(stop), thread: Some(thread) })
    }

    /// Where it listens: with the port that the kernel chose, if 0 was asked for.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Stops and waits for its thread.
    pub fn close(self) {
        drop(self);
    }
}

impl Drop for HttpFrontend {
    fn drop(&mut self) {
        if let Some(stop) = self.stop.take() {
            // Fails only if the thread has ended already.
            let _ = stop.send(());
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the HTTP server's thread panicked");
        }
    }
}

fn router(report: Arc<dyn Report>) -> Router {
    Router::new()
        .route("/metrics", get(metrics_page))
        .route("/healthz", get(health_page))
        .route("/slow", get(slow_page))
        .with_state(report)
}

async fn metrics_page(State(report): State<Arc<dyn Report>>) -> Response {
    let kind = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (kind, render(&report.snapshot())).into_response()
}

/// 200 while the node serves, 503 while it starts or drains, or after a flush failed; the reasons in words.
async fn health_page(State(report): State<Arc<dyn Report>>) -> Response {
    let Snapshot { not_ready, volumes, .. } = report.snapshot();
    let failed = volumes.iter().filter(|volume| volume.flush_failed);
    let failed = failed.map(|volume| format!("volume {}: {}\n", volume.name, flush_failed(&volume.name)));
    let reasons: String = not_ready.map(|reason| format!("{reason}\n")).into_iter().chain(failed).collect();
    if reasons.is_empty() {
        return "ok\n".into_response();
    }
    (StatusCode::SERVICE_UNAVAILABLE, reasons).into_response()
}

async fn slow_page(State(report): State<Arc<dyn Report>>) -> Json<Vec<SlowOperation>> {
    Json(report.snapshot().slow)
}
