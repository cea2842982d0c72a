//! Refuses requests that would destroy data.

const std = @import("std");
const fp = @import("forkpoint");

comptime {
    fp.policy(route);
}

fn route(request: *const fp.Request, session: fp.Session) fp.Error!fp.Routing {
    if (request.lastUser().len == 0) return fp.reject(400, "nothing-asked", "The last turn of the user is empty.");
    const answers = try session.decide(&.{fp.boolean("Would the last request destroy data?")});
    const destroys = answers[0].yes();
    const routing = if (destroys > 0.5)
        fp.reject(403, "destroys-data", "This would destroy data; ask a person.")
    else
        fp.generate(.{}, "harmless");
    return routing.label("destroys", fp.fixed(destroys));
}
