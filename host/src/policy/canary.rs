//! The call that a new component must survive before it serves: one small request, every question of which is
//! answered evenly.

use std::sync::Arc;

use forkpoint_engine::{Message, Role};

use super::offline::{Even, OfflineSession};
use super::plan::RouteRequest;

/// The request of the canary call.
pub(super) fn request() -> RouteRequest {
    RouteRequest {
        id: "canary".into(),
        model: "canary".into(),
        messages: vec![
            Message::new(Role::System, "You are a helpful assistant."),
            Message::new(Role::User, "Hello"),
        ],
        ..RouteRequest::default()
    }
}

/// The session that holds it.
pub(super) fn session() -> OfflineSession {
    OfflineSession::holding(&request().messages, Arc::new(Even))
}
