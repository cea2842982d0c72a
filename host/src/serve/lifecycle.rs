//! What operators do to policies over HTTP: upload, remove, switch off and on, promote, roll back.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use serde_json::json;

use super::body::read_bytes;
use super::catalog::readable;
use super::{App, RequestContext};
use crate::policy::{ChangeError, PolicyStatus};
use crate::wire::{ApiError, Kind};

/// How long a component may take to arrive: some have tens of megabytes.
const UPLOAD: Duration = Duration::from_secs(600);

/// `PUT /v1/policies/{name}`: the component is the body.
pub(super) async fn upload(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    name: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Json<PolicyStatus>, ApiError> {
    context.operator()?;
    let name = readable(name)?;
    let component = read_bytes(request, app.policies.max_file(), UPLOAD).await?;
    let policies = app.policies.clone();
    let upload = async move { policies.upload(&name, component.into()).await };
    Ok(Json(app.policies.to_the_end(upload).await?))
}

/// `PUT /v1/policies/{name}/manifest`: the manifest, TOML, is the body.
pub(super) async fn describe(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    name: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Response, ApiError> {
    context.operator()?;
    let name = readable(name)?;
    let manifest = read_bytes(request, app.server.max_body_bytes.0, UPLOAD).await?;
    let (policies, policy) = (app.policies.clone(), name.clone());
    let describe = async move { policies.describe(&policy, manifest.into()).await };
    Ok(match app.policies.to_the_end(describe).await? {
        Some(status) => Json(status).into_response(),
        None => {
            let waits = json!({ "name": name, "state": "waiting", "message": "waits for its component" });
            (StatusCode::ACCEPTED, Json(waits)).into_response()
        }
    })
}

/// `DELETE /v1/policies/{name}`.
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    context.operator()?;
    let (policies, name) = (app.policies.clone(), readable(name)?);
    app.policies.to_the_end(async move { policies.remove(&name).await }).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// `POST /v1/policies/{name}/{action}`.
pub(super) async fn act(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    names: Result<Path<(String, String)>, PathRejection>,
) -> Result<Json<PolicyStatus>, ApiError> {
    context.operator()?;
    let Path((name, action)) = names.map_err(|error| ApiError::new(Kind::NotFound, error.body_text()))?;
    let policies = app.policies.clone();
    if !["disable", "enable", "promote", "rollback"].contains(&action.as_str()) {
        let message = format!("no action {action:?}; there are disable, enable, promote and rollback");
        return Err(ApiError::new(Kind::NotFound, message));
    }
    let change = async move {
        match action.as_str() {
            "disable" => policies.disable(&name).await,
            "enable" => policies.enable(&name).await,
            "promote" => policies.promote(&name).await,
            _ => policies.roll_back(&name).await,
        }
    };
    Ok(Json(app.policies.to_the_end(change).await?))
}

impl From<ChangeError> for ApiError {
    fn from(error: ChangeError) -> Self {
        let message = error.to_string();
        let kind = match error {
            ChangeError::Unknown(_) => Kind::NotFound,
            ChangeError::Name(_) => Kind::Invalid,
            ChangeError::Refused(refused) => {
                Kind::Rejected { status: 422, code: refused.code.code().to_owned(), retry_after: None }
            }
            ChangeError::Conflict(_) => {
                Kind::Rejected { status: 409, code: "conflict".to_owned(), retry_after: None }
            }
            ChangeError::Disk { .. } => Kind::Internal,
        };
        Self::new(kind, message)
    }
}
