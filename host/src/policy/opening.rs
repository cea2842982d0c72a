//! A request's session, opened when it is first needed.

use std::pin::Pin;

use forkpoint_engine::{EngineError, Session, Usage};

/// A session that is opened when it is first needed: a request that never needs one computes nothing.
pub struct Opening(Stage);

enum Stage {
    Waiting(Pin<Box<dyn Future<Output = Result<Session, EngineError>> + Send>>),
    Open(Session),
    Failed(EngineError),
}

impl Opening {
    /// One that `open` opens; it is polled once the session is needed, and by nobody else.
    pub fn new(open: impl Future<Output = Result<Session, EngineError>> + Send + 'static) -> Self {
        Self(Stage::Waiting(Box::pin(open)))
    }

    /// The session, which is opened unless it is. Where this is dropped on the way, the next call goes on from there:
    /// nothing is computed twice. It is tried once: what failed has failed for the whole request.
    ///
    /// # Errors
    /// Why it could not be opened, the same for every call.
    pub async fn open(&mut self) -> Result<&mut Session, &EngineError> {
        if let Stage::Waiting(open) = &mut self.0 {
            self.0 = match open.await {
                Ok(session) => Stage::Open(session),
                Err(error) => Stage::Failed(error),
            };
        }
        match &mut self.0 {
            Stage::Open(session) => Ok(session),
            Stage::Failed(error) => Err(error),
            Stage::Waiting(_) => unreachable!("it was awaited above"),
        }
    }

    /// The session itself, which is opened unless it is.
    ///
    /// # Errors
    /// Why it could not be opened.
    pub async fn opened(self) -> Result<Session, EngineError> {
        match self.0 {
            Stage::Waiting(open) => open.await,
            Stage::Open(session) => Ok(session),
            Stage::Failed(error) => Err(error),
        }
    }

    /// The session, if it is open.
    #[must_use]
    pub fn session(&self) -> Option<&Session> {
        match &self.0 {
            Stage::Open(session) => Some(session),
            _ => None,
        }
    }

    /// What the session holds and what it cost, if it is open.
    #[must_use]
    pub fn usage(&self) -> Option<Usage> {
        self.session().map(Session::usage)
    }

    /// Why it could not be opened, if that was tried.
    #[must_use]
    pub fn failure(&self) -> Option<&EngineError> {
        match &self.0 {
            Stage::Failed(error) => Some(error),
            _ => None,
        }
    }

    /// The session itself, if it is open.
    #[must_use]
    pub fn into_session(self) -> Option<Session> {
        match self.0 {
            Stage::Open(session) => Some(session),
            _ => None,
        }
    }
}

impl From<Session> for Opening {
    fn from(session: Session) -> Self {
        Self(Stage::Open(session))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    use std::time::Duration;

    use tokio::sync::Notify;

    use super::*;

    #[tokio::test]
    async fn it_is_begun_when_it_is_needed_and_goes_on_where_it_was_left() {
        let (begun, go) = (Arc::new(AtomicU32::new(0)), Arc::new(Notify::new()));
        let mut opening = Opening::new({
            let (begun, go) = (begun.clone(), go.clone());
            async move {
                begun.fetch_add(1, Relaxed);
                go.notified().await;
                Err(EngineError::Stopped)
            }
        });
        assert_eq!(begun.load(Relaxed), 0);
        for _ in 0..2 {
            let left = tokio::time::timeout(Duration::from_millis(5), opening.open()).await.map(|_| ());
            assert!(left.is_err() && opening.failure().is_none());
            assert_eq!(begun.load(Relaxed), 1);
        }
        go.notify_one();
        for _ in 0..2 {
            assert!(matches!(opening.open().await, Err(EngineError::Stopped)));
        }
        assert!(opening.failure().is_some() && opening.usage().is_none());
        assert_eq!(begun.load(Relaxed), 1, "what failed is not tried again");
    }
}
