//! Policies in shadow: asked once a request has its plan, apart from it, and never carried out.

use std::sync::Arc;
use std::time::Instant;

use forkpoint_engine::{Session, Usage};
use tokio::sync::OwnedSemaphorePermit;

use super::guest::{self, Place};
use super::opening::Opening;
use super::plan::{Plan, RouteRequest};
use super::registry::Published;
use super::trace::Step;
use super::{Policies, Shared};
use crate::journal::{Record, SessionRecord};

/// The policies in shadow of one request.
pub(super) struct Shadows {
    shared: Arc<Shared>,
    policies: Vec<Arc<Published>>,
    request: Arc<RouteRequest>,
    /// Of the conversation.
    hash: u64,
    /// When the chain was asked.
    asked: Instant,
}

impl Policies {
    /// Those of these names.
    pub(super) fn shadows(
        &self,
        names: Vec<&String>,
        request: &Arc<RouteRequest>,
        hash: u64,
        asked: Instant,
    ) -> Shadows {
        let policies = names.into_iter().filter_map(|name| self.shared.registry.current(name)).collect();
        Shadows { shared: self.shared.clone(), policies, request: request.clone(), hash, asked }
    }
}

impl Shadows {
    /// Asks them, one after the other, while the plan goes on with the session that this gives back: on a fork of it
    /// where it is open; where the plan is to open it, on a fork once it has. Where neither holds they have it to
    /// themselves, and the first that needs it opens it.
    pub(super) async fn follow(self, plan: &Plan, mut session: Opening) -> Opening {
        if self.policies.is_empty() {
            return session;
        }
        if let Some(error) = session.failure() {
            self.passed(&error.to_string());
        } else if let Some(open) = session.session() {
            self.ask_on_fork(open).await;
        } else if matches!(plan, Plan::Generate(_)) {
            return Opening::new(async move {
                let session = session.opened().await?;
                self.ask_on_fork(&session).await;
                Ok(session)
            });
        } else if let Some(permit) = self.permit() {
            self.ask_alone(session.take(), permit);
        }
        session
    }

    async fn ask_on_fork(self, session: &Session) {
        let Some(permit) = self.permit() else { return };
        let (usage, fork) = (session.usage(), session.fork().await);
        match fork {
            Ok(fork) => {
                self.shared.tasks.clone().spawn(self.ask(fork.into(), Some(usage), permit));
            }
            Err(error) => self.passed(&error.to_string()),
        }
    }

    /// To open a session may take long: for no longer than the request might, nor beyond the server's end.
    fn ask_alone(self, session: Opening, permit: OwnedSemaphorePermit) {
        let (shared, request) = (self.shared.clone(), self.request.clone());
        shared.tasks.clone().spawn(async move {
            let late = async {
                match request.deadline {
                    Some(deadline) => tokio::time::sleep_until(deadline.into()).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = self.ask(session, None, permit) => {}
                () = late => passed(&request, "its request's time is over"),
                () = shared.stopping.cancelled() => passed(&request, "the server stops"),
            }
        });
    }

    /// `usage` is what the request's session had before these calls, where it was open.
    async fn ask(self, mut session: Opening, usage: Option<Usage>, _permit: OwnedSemaphorePermit) {
        let Self { shared, policies, request, hash, asked } = self;
        for policy in policies {
            let headers = policy.settings.visible(&request.headers);
            let at_us = guest::micros(asked.elapsed());
            let called = shared.run(&policy, &request, hash, Place::Engine(session)).await;
            session = called.place.into_opening().expect("the session is the one that was lent");
            let step = Step { at_us, ..called.step };
            if let (Some(traces), Some(context)) = (&shared.options.traces, &request.trace) {
                traces.shadow(context, asked, &step);
            }
            if let Some(journal) = &shared.options.journal {
                let held = usage.map_or_else(|| SessionRecord::from(&session), SessionRecord::from);
                journal.write(Record::shadow(&request, step, held, headers, journal.keeps_prompts()));
            }
        }
    }

    /// A place among the calls in shadow.
    fn permit(&self) -> Option<OwnedSemaphorePermit> {
        let permit = self.shared.shadow_places.clone().try_acquire_owned().ok();
        if permit.is_none() {
            self.passed("too many calls in shadow");
        }
        permit
    }

    fn passed(&self, why: &str) {
        passed(&self.request, why);
    }
}

fn passed(request: &RouteRequest, why: &str) {
    tracing::debug!(target: "policy", request = request.id, why, "not asked in shadow");
}
