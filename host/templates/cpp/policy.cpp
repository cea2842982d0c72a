// Refuses requests that would destroy data.
#include "forkpoint.hpp"

using namespace forkpoint;

static Result<Routing> route(const Request &request, const Session &session) {
  if (request.last_user().empty()) return reject(400, "nothing-asked", "The last turn of the user is empty.");
  auto answers = session.decide({boolean("Would the last request destroy data?")});
  if (!answers) return std::unexpected(answers.error());
  double destroys = answers->front().yes;
  Routing routing = destroys > 0.5 ? reject(403, "destroys-data", "This would destroy data; ask a person.")
                                   : generate("harmless");
  return std::move(routing).label("destroys", destroys);
}

FP_POLICY(route)
