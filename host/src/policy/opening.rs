//! A request's session, opened when it is first needed.

use forkpoint_engine::{EngineError, Session, Usage};
use futures::future::BoxFuture;

/// What opens a session.
type Opens = BoxFuture<'static, Result<Session, EngineError>>;

/// What notes an opening while it goes on.
type Noted = Box<dyn FnOnce(Opens) -> Opens + Send>;

/// A session that is opened when it is first needed: a request that never needs one computes nothing.
pub struct Opening(Stage);

enum Stage {
    Waiting(Opens, Option<Noted>),
    Open(Session),
    Failed(EngineError),
}

impl Opening {
    /// One that `open` opens; it is polled once the session is needed, and by nobody else.
    pub fn new(open: impl Future<Output = Result<Session, EngineError>> + Send + 'static) -> Self {
        Self(Stage::Waiting(Box::pin(open), None))
    }

    /// The same, opened by way of `note`, as long as it is the request's own.
    #[must_use]
    pub fn noted<F>(self, note: impl FnOnce(Opens) -> F + Send + 'static) -> Self
    where
        F: Future<Output = Result<Session, EngineError>> + Send + 'static,
    {
        match self.0 {
            Stage::Waiting(open, _) => {
                Self(Stage::Waiting(open, Some(Box::new(move |open| Box::pin(note(open))))))
            }
            _ => self,
        }
    }

    /// Takes it from a request that needs none any more: what opens it then is not noted as the request's. What stays
    /// behind is not open, and never will be.
    pub(super) fn take(&mut self) -> Self {
        let gone = EngineError::Invalid("the request gave its session away unopened".into());
        match std::mem::replace(self, Self::new(async { Err(gone) })).0 {
            Stage::Waiting(open, _) => Self(Stage::Waiting(open, None)),
            stage => Self(stage),
        }
    }

    /// The session, which is opened unless it is. Where this is dropped on the way, the next call goes on from there:
    /// nothing is computed twice. It is tried once: what failed has failed for the whole request.
    ///
    /// # Errors
    /// Why it could not be opened, the same for every call.
    pub async fn open(&mut self) -> Result<&mut Session, &EngineError> {
        if let Stage::Waiting(open, noted) = &mut self.0 {
            if let Some(note) = noted.take() {
                let opens = std::mem::replace(open, Box::pin(std::future::pending()));
                *open = note(opens);
            }
            self.0 = match open.await {
                Ok(session) => Stage::Open(session),
                Err(error) => Stage::Failed(error),
            };
        }
        match &mut self.0 {
            Stage::Open(session) => Ok(session),
            Stage::Failed(error) => Err(error),
            Stage::Waiting(..) => unreachable!("it was awaited above"),
        }
    }

    /// The session itself, which is opened unless it is.
    ///
    /// # Errors
    /// Why it could not be opened.
    pub async fn opened(mut self) -> Result<Session, EngineError> {
        // What it gives is taken below.
        let _ = self.open().await;
        match self.0 {
            Stage::Open(session) => Ok(session),
            Stage::Failed(error) => Err(error),
            Stage::Waiting(..) => unreachable!("it was awaited above"),
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

    /// What a policy is told of it: what it holds and what it cost. Of a conversation that outgrows the context, its
    /// tokens; else nothing where it is not open.
    #[must_use]
    pub fn told(&self) -> Usage {
        match &self.0 {
            Stage::Open(session) => session.usage(),
            Stage::Failed(error) => would_hold(error),
            Stage::Waiting(..) => Usage::default(),
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

/// What is told of a session that could not be opened.
pub(crate) fn would_hold(error: &EngineError) -> Usage {
    match error {
        EngineError::TooLong { tokens, .. } => {
            Usage { tokens: u32::try_from(*tokens).unwrap_or(u32::MAX), ..Usage::default() }
        }
        _ => Usage::default(),
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

    #[tokio::test]
    async fn what_notes_it_goes_with_the_request() {
        let error = || EngineError::TooLong { tokens: 5_000, limit: 4_096 };
        let noted = Arc::new(AtomicU32::new(0));
        let opening = || {
            let noted = noted.clone();
            Opening::new(async move { Err(error()) }).noted(move |open| {
                noted.fetch_add(1, Relaxed);
                open
            })
        };
        let mut own = opening();
        assert_eq!((noted.load(Relaxed), own.told()), (0, Usage::default()));
        for _ in 0..2 {
            assert!(matches!(own.open().await, Err(EngineError::TooLong { .. })));
            assert_eq!(noted.load(Relaxed), 1);
        }
        assert_eq!(own.told(), Usage { tokens: 5_000, ..Usage::default() });
        assert!(opening().opened().await.is_err());
        assert_eq!(noted.load(Relaxed), 2);

        let mut given = opening();
        let mut taken = given.take();
        assert!(matches!(taken.open().await, Err(EngineError::TooLong { .. })));
        assert!(given.failure().is_none() && given.session().is_none());
        assert!(matches!(given.opened().await, Err(EngineError::Invalid(_))));
        assert_eq!(noted.load(Relaxed), 2, "no more the request's");
    }
}
