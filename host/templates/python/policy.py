"""Refuses requests that would destroy data."""

from forkpoint_policy import boolean, decide, generate, last_user, policy, reject


@policy
def route(request, session):
    if not last_user(request):
        return reject(400, "nothing-asked", "The last turn of the user is empty.")
    [destroys] = decide(session, [boolean("Would the last request destroy data?")])
    labels = {"destroys": f"{destroys.yes:.2f}"}
    if destroys.yes > 0.5:
        return reject(403, "destroys-data", "This would destroy data; ask a person.", labels)
    return generate("harmless", labels)
