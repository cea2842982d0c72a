//! Sends a share of the traffic another way: to try an upstream, a model or another policy on some before all.
//!
//! Who is in the share is a matter of a hash of the tenant or the conversation, so each stays where it was put: a tool
//! loop is not torn apart, and raising the percentage moves more in and nobody out. The salt names the experiment; another
//! salt deals anew. Tenants can be pinned either way. Nothing is asked.
//!
//! Configuration: docs/policies/canary-split.md.

use forkpoint_policy::*;

/// Into how many buckets hashes fall: a hundredth of a percent each.
const BUCKETS: u64 = 10_000;

#[policy]
fn route(request: &Request, _session: &Session) -> Result<Routing> {
    let percent = config_within("percent", 5.0, 0.0..=100.0)?;
    let salt = config("salt").unwrap_or_default();
    let canary = config_or("canary", Outcome::Forward("canary".into(), None))?;
    let control = config_or("control", Outcome::Generate)?;
    let by = config("by").unwrap_or_else(|| "conversation".into());
    let header = config("tenant-header").unwrap_or_else(|| "x-tenant".into());
    let tenant = request.filled_header(&header);

    let message = "This experiment is closed.";
    let listed =
        |key: &str| tenant.is_some_and(|tenant| config_list(key, "").iter().any(|name| name == tenant));
    if listed("never") {
        return Ok(control.because("pinned", message).label("arm", "control"));
    }
    if listed("always") {
        return Ok(canary.because("pinned", message).label("arm", "canary"));
    }
    let who = match (by.as_str(), tenant) {
        ("conversation", _) => request.conversation_key(tenant),
        ("tenant", Some(tenant)) => tenant.to_owned(),
        ("tenant", None) => return Ok(control.because("no-tenant", message).label("arm", "control")),
        _ => return Err(format!("config by = {by:?}: expected conversation or tenant").into()),
    };
    let bucket = bucket(&salt, &who);
    let routing = if in_share(bucket, percent) {
        canary.because("canary", message).label("arm", "canary")
    } else {
        control.because("control", message).label("arm", "control")
    };
    Ok(routing.label("bucket", bucket))
}

fn bucket(salt: &str, who: &str) -> u64 {
    stable_hash([salt, who]) % BUCKETS
}

fn in_share(bucket: u64, percent: f64) -> bool {
    (bucket as f64) < (percent / 100.0 * BUCKETS as f64).round()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_about_as_large_as_it_says() {
        let count =
            |salt, percent| (0..20_000).filter(|n| in_share(bucket(salt, &n.to_string()), percent)).count();
        assert!((900..1100).contains(&count("a", 5.0)), "{}", count("a", 5.0));
        assert_eq!((count("a", 0.0), count("a", 100.0)), (0, 20_000));
    }

    #[test]
    fn a_larger_share_holds_the_smaller_and_a_salt_deals_anew() {
        let members =
            |salt, percent| (0..2000).filter(move |n| in_share(bucket(salt, &n.to_string()), percent));
        let more: Vec<i32> = members("a", 20.0).collect();
        assert!(members("a", 5.0).all(|n| more.contains(&n)));
        let other: Vec<i32> = members("b", 20.0).collect();
        assert!(more.iter().filter(|n| other.contains(n)).count() < more.len() / 2);
    }
}
