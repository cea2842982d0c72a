//! Refuses requests that would destroy data.

use forkpoint_policy::*;

#[policy]
fn route(request: &Request, session: &Session) -> Result<Routing> {
    if request.last_user().is_empty() {
        return Ok(reject(400, "nothing-asked", "The last turn of the user is empty."));
    }
    let destroys = session.ask(boolean("Would the last request destroy data?"))?;
    let routing = if destroys.yes > 0.5 {
        reject(403, "destroys-data", "This would destroy data; ask a person.")
    } else {
        generate().because("harmless")
    };
    Ok(routing.label("destroys", format!("{:.2}", destroys.yes)))
}
