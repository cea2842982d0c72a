//! What operators do to policies over HTTP: upload, remove, switch off and on, promote, roll back.

use std::sync::Arc;

use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};

use super::body::read_bytes;
use super::catalog::readable;
use super::{App, RequestContext};
use crate::policy::{ChangeError, PolicyStatus};
use crate::wire::{ApiError, Kind};

/// `PUT /v1/policies/{name}`: the component is the body.
pub(super) async fn upload(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    name: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Json<PolicyStatus>, ApiError> {
    context.operator()?;
    let name = readable(name)?;
    let component = read_bytes(request, app.policies.max_file()).await?;
    Ok(Json(app.policies.upload(&name, component.into()).await?))
}

/// `PUT /v1/policies/{name}/manifest`: the manifest, TOML, is the body.
pub(super) async fn describe(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    name: Result<Path<String>, PathRejection>,
    request: Request,
) -> Result<Json<PolicyStatus>, ApiError> {
    context.operator()?;
    let name = readable(name)?;
    let manifest = read_bytes(request, app.server.max_body_bytes.0).await?;
    Ok(Json(app.policies.describe(&name, manifest.into()).await?))
}

/// `DELETE /v1/policies/{name}`.
pub(super) async fn remove(
    State(app): State<Arc<App>>,
    Extension(context): Extension<RequestContext>,
    name: Result<Path<String>, PathRejection>,
) -> Result<Response, ApiError> {
    context.operator()?;
    app.policies.remove(&readable(name)?).await?;
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
    let policies = &app.policies;
    Ok(Json(match action.as_str() {
        "disable" => policies.disable(&name).await?,
        "enable" => policies.enable(&name).await?,
        "promote" => policies.promote(&name).await?,
        "rollback" => policies.roll_back(&name).await?,
        _ => {
            let message = format!("no action {action:?}; there are disable, enable, promote and rollback");
            return Err(ApiError::new(Kind::NotFound, message));
        }
    }))
}

impl From<ChangeError> for ApiError {
    fn from(error: ChangeError) -> Self {
        let message = error.to_string();
        let kind = match error {
            ChangeError::Unknown(_) => Kind::NotFound,
            ChangeError::Name(_) => Kind::Invalid,
            ChangeError::Refused(refused) => {
                Kind::Rejected { status: 422, code: refused.code.code().to_owned() }
            }
            ChangeError::Conflict(_) => Kind::Rejected { status: 409, code: "conflict".to_owned() },
            ChangeError::Disk { .. } => Kind::Internal,
        };
        Self::new(kind, message)
    }
}
