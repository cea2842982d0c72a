//! Connections: accepting them, bounding them, and letting them finish when the server stops.

use std::future::poll_fn;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::{Request, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use super::{App, ServeError};
use crate::config::Config;

/// How long a client may take to send a request's headers.
const HEADER_TIMEOUT: Duration = Duration::from_secs(30);

/// How long a connection is read on after its last answer, until the client has closed its side.
const LINGER: Duration = Duration::from_secs(1);

/// A server that runs. [`Server::stop`] ends it; dropping it leaves it running with the runtime.
pub struct Server {
    app: Arc<App>,
    addr: SocketAddr,
    /// Cancelled when connections are to be closed whatever they do.
    abort: CancellationToken,
    accept: JoinHandle<()>,
    connections: TaskTracker,
}

impl Server {
    /// Loads what the configuration names and serves it on a socket.
    ///
    /// # Errors
    /// As [`App::load`].
    pub async fn start(config: &Config, listener: TcpListener) -> Result<Self, ServeError> {
        let addr =
            listener.local_addr().map_err(|error| ServeError::Listen { addr: config.server.addr, error })?;
        let app = App::load(config).await?;
        let (abort, connections) = (CancellationToken::new(), TaskTracker::new());
        let accept = tokio::spawn(accept(app.clone(), listener, connections.clone(), abort.clone()));
        Ok(Self { app, addr, abort, accept, connections })
    }

    /// Where it listens.
    #[must_use]
    pub fn addr(&self) -> SocketAddr {
        self.addr
    }

    /// What it serves.
    #[must_use]
    pub fn app(&self) -> &Arc<App> {
        &self.app
    }

    /// Accepts no more, lets requests in flight finish for as long as the configuration says, then closes what
    /// is left, stops the policies and the engine.
    pub async fn stop(self) {
        self.app.stopping.cancel();
        if let Err(error) = self.accept.await {
            tracing::error!(%error, "the accepting task broke off");
        }
        self.connections.close();
        if tokio::time::timeout(self.app.server.drain_timeout(), self.connections.wait()).await.is_err() {
            tracing::warn!(left = self.connections.len(), "closing connections that have not finished");
            self.abort.cancel();
            self.connections.wait().await;
        }
        self.app.policies.stop().await;
        if let Some(journal) = &self.app.journal {
            // After the last request and the last call in shadow.
            journal.close();
        }
        if let Some(traces) = &self.app.traces {
            traces.close().await;
        }
        let engine = self.app.engine.clone();
        // Joins the engine's thread, which finishes its step first.
        if let Err(error) = tokio::task::spawn_blocking(move || engine.stop()).await {
            tracing::error!(%error, "the engine broke off while stopping");
        }
    }
}

/// Accepts connections until the server stops.
async fn accept(app: Arc<App>, listener: TcpListener, connections: TaskTracker, abort: CancellationToken) {
    let open = Arc::new(Semaphore::new(app.server.max_connections));
    let router = app.router();
    loop {
        let next = async {
            let permit = open.clone().acquire_owned().await;
            (permit, listener.accept().await)
        };
        let (permit, accepted) = tokio::select! {
            next = next => next,
            () = app.stopping.cancelled() => return,
        };
        match accepted {
            Ok((stream, _)) => {
                let (app, router, abort) = (app.clone(), router.clone(), abort.clone());
                connections.spawn(async move {
                    serve_connection(&app, router, stream, &abort).await;
                    drop(permit);
                });
            }
            Err(error) => {
                // Out of file handles, or a client that is gone already: the next one may do better.
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn serve_connection(app: &App, router: Router, stream: TcpStream, abort: &CancellationToken) {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let service = service_fn(move |request: Request<Incoming>| {
        Box::pin(router.clone().oneshot(request.map(Body::new)))
    });
    let mut connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_TIMEOUT)
        .serve_connection(TokioIo::new(stream), service);
    let mut draining = false;
    let ended = loop {
        tokio::select! {
            ended = poll_fn(|context| connection.poll_without_shutdown(context)) => break ended,
            () = app.stopping.cancelled(), if !draining => {}
            () = abort.cancelled() => return,
        }
        draining = true;
        Pin::new(&mut connection).graceful_shutdown();
    };
    match ended {
        Ok(()) => {
            let closing = close(connection.into_parts().io.into_inner());
            // How long it waits is up to the client; the answer is on its way.
            if tokio::time::timeout(LINGER, closing).await.is_err() {
                tracing::debug!("a client keeps sending after its answer");
            }
        }
        Err(error) => tracing::debug!(%error, "a connection ended early"),
    }
}

/// Closes a connection so that its last answer arrives: a socket that is closed with bytes unread is reset, and a
/// reset takes from the client what it has not read yet. That is so for bodies that are refused half way.
async fn close(mut stream: TcpStream) {
    if stream.shutdown().await.is_err() {
        return;
    }
    let mut rest = vec![0; 16 << 10];
    while let Ok(1..) = stream.read(&mut rest).await {}
}
