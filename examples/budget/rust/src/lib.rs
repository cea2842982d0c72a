//! Holds each tenant to a quota of requests and tokens a window, asking nothing.
//!
//! Near its quota a tenant is degraded: the model here answers, with a shorter reply. Beyond it, requests are refused
//! with 429 until the window ends. Tokens are charged before the reply: the prompt's, which the session knows, and the
//! most that the reply may have. A request that is refused is charged nothing, and one whose quota is used up already is
//! refused before its prompt is computed.
//!
//! Configuration: docs/policies/budget.md.

use forkpoint_policy::*;
use std::time::Duration;

struct Quota {
    requests: i64,
    tokens: i64,
    window: Duration,
}

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    let quota = Quota {
        requests: config_within("requests", 1000, 1..)?,
        tokens: config_within("tokens", 1_000_000, 1..)?,
        window: Duration::from_secs(config_within("window-seconds", 3600, 1..=u64::from(u32::MAX))?),
    };
    let degrade_at = config_within("degrade-at", 0.8, 0.0..=1.0)?;
    let short = config_within("degraded-max-tokens", 128, 1..)?;
    let assumed = config_within("reply-tokens", 512, 1..=1_000_000)?;
    let within = config_or("within", Outcome::Next)?;
    let on_failure = config_or("on-failure", Outcome::Reject(503))?;

    let header = config("tenant-header").unwrap_or_else(|| "x-tenant".into());
    let tenant = tenant(request.filled_header(&header), &config_list("tenants", ""));
    let reply = request.sampling.max_tokens.unwrap_or(assumed);
    let charged = match used_up(&tenant, reply.into(), &quota) {
        Some(charged) => charged,
        None => {
            // This computes the prompt.
            let prompt = session.usage().tokens;
            if prompt == 0 && !request.messages.is_empty() {
                let message = "The request's tokens could not be counted; try again later.";
                return Ok(on_failure.because("engine-failed", message).label("tenant", tenant));
            }
            match charge(&tenant, i64::from(prompt) + i64::from(reply), &quota) {
                Ok(charged) => charged,
                Err(error) => {
                    warn(&error.to_string());
                    let message = "The quota could not be read; try again later.";
                    return Ok(on_failure.because("store-failed", message).label("tenant", tenant));
                }
            }
        }
    };
    let used =
        (charged.requests as f64 / quota.requests as f64).max(charged.tokens as f64 / quota.tokens as f64);
    let minutes = quota.window.as_secs().div_ceil(60);
    let routing = if let Some(code) = charged.over {
        let message = if charged.alone {
            "This request alone may take more tokens than the tenant's quota holds.".to_owned()
        } else {
            format!("The quota of this tenant is used up; it is renewed within {minutes} minutes.")
        };
        reject(429, code, message)
    } else if used >= degrade_at {
        generate()
            .max_tokens(request.sampling.max_tokens.map_or(short, |most| most.min(short)))
            .because("degraded")
    } else {
        within.because("within", "")
    };
    Ok(routing
        .label("tenant", tenant)
        .label("requests", charged.requests)
        .label("tokens", charged.tokens)
        .figure("used", used))
}

/// What a window holds with this request; `over` is the code of a refusal, `alone` says that it is so in any window.
struct Charged {
    requests: i64,
    tokens: i64,
    over: Option<&'static str>,
    alone: bool,
}

/// What the window holds, where a request is beyond it that costs at least so many tokens.
fn used_up(tenant: &str, least: i64, quota: &Quota) -> Option<Charged> {
    let (requests, tokens) = (store::count(&keys(tenant)[0]), store::count(&keys(tenant)[1]));
    // A prompt has a token at least.
    let alone = least >= quota.tokens;
    let over = if alone || (requests < quota.requests && tokens.saturating_add(least) >= quota.tokens) {
        "quota-tokens"
    } else if requests >= quota.requests {
        "quota-requests"
    } else {
        return None;
    };
    Some(Charged { requests, tokens, over: Some(over), alone })
}

fn keys(tenant: &str) -> [String; 2] {
    [format!("requests:{tenant}"), format!("tokens:{tenant}")]
}

/// Adds a request to its tenant's window, and takes it out again where it does not fit. The additions are atomic, so two
/// requests at once never share what is left.
fn charge(tenant: &str, cost: i64, quota: &Quota) -> Result<Charged> {
    let keys = keys(tenant);
    let add = |key: &str, by: i64| store::add(key, by, Some(quota.window));
    // What never fits is not charged even for a moment: others would be refused meanwhile.
    if cost > quota.tokens {
        let (requests, tokens) = (store::count(&keys[0]), store::count(&keys[1]));
        return Ok(Charged { requests, tokens, over: Some("quota-tokens"), alone: true });
    }
    // Below nothing, the window has ended in between: the new one owes this request nothing.
    let take_back = |key: &str, by: i64| -> Result<()> {
        if add(key, -by)? < 0 {
            add(key, by)?;
        }
        Ok(())
    };
    let requests = add(&keys[0], 1)?;
    let tokens = match add(&keys[1], cost) {
        Ok(tokens) => tokens,
        // A store that is full may have room for one of the two.
        Err(error) => {
            take_back(&keys[0], 1)?;
            return Err(error);
        }
    };
    let over = if requests > quota.requests {
        Some("quota-requests")
    } else if tokens > quota.tokens {
        Some("quota-tokens")
    } else {
        None
    };
    if over.is_some() {
        take_back(&keys[0], 1)?;
        take_back(&keys[1], cost)?;
        return Ok(Charged { requests: requests - 1, tokens: tokens - cost, over, alone: false });
    }
    Ok(Charged { requests, tokens, over, alone: false })
}

/// Whose quota it is: the header's, where the operator lists no tenants or lists this one. All others share one, since
/// names that clients make up must not be new quotas.
fn tenant(header: Option<&str>, listed: &[String]) -> String {
    let Some(name) = header else { return "nobody".into() };
    let known = listed.is_empty() || listed.iter().any(|one| one == name);
    match name {
        _ if !known => "others".into(),
        // A store's key and a label's value are bounded.
        _ if name.len() > 64 => format!("{:016x}", stable_hash([name])),
        _ => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::tenant;

    #[test]
    fn made_up_tenants_share_a_quota() {
        let listed = ["acme".to_owned(), "globex".to_owned()];
        assert_eq!(tenant(Some("acme"), &[]), "acme");
        assert_eq!(tenant(Some("acme"), &listed), "acme");
        assert_eq!(tenant(Some("acme-2"), &listed), "others");
        assert_eq!(tenant(None, &listed), "nobody");
        assert_eq!(tenant(None, &[]), "nobody");
        assert_eq!(tenant(Some(&"x".repeat(65)), &[]).len(), 16);
    }
}
