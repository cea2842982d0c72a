// The gate of ../rust in C++: the same rules, questions and reasons. rules.hpp says what a command's text says by
// itself.
#include "forkpoint.hpp"
#include "rules.hpp"
#include <algorithm>

using namespace forkpoint;

// A command longer than this is not judged but refused: what cannot be read cannot be trusted.
static constexpr size_t LONGEST = 4000;

// Below this mass a session is unlike all that a probe was fitted to.
static constexpr double KNOWN_FROM = 0.02;

static Routing refuse() { return reject(403, "shell-risk", "This could destroy data; ask a person."); }

// Asks how bad `act` is and refuses from `deny_at` on.
static Result<Routing> judge(const Session &session, const std::string &act, double deny_at) {
  auto answers = session.decide({
      choice("What would running " + act + " do to this computer?",
             {{"nothing", "it only reads, or runs no command at all"},
              {"change", "it changes files or settings, and that can be undone"},
              {"destroy", "it deletes or overwrites what cannot be had back"}}),
      boolean("Could running " + act + " lose data for good?"),
  });
  if (!answers) return std::unexpected(answers.error());
  const Answer &harm = (*answers)[0], &lost = (*answers)[1];
  double destroy = harm.probabilities[2];
  bool refused = destroy >= deny_at || (lost.yes >= deny_at && harm.choice != "nothing");
  return (refused ? refuse() : next("shell-ok")).label("destroy", destroy).label("lost", lost.yes);
}

// Asks the probes whether the user's request needs a shell and would destroy, and refuses when it surely does: from
// `request_at` on, from `deny_at` on where labels were read, from the smaller one on where either answer is unsure.
static Result<Routing> judge_request(const Session &session, double request_at, double deny_at) {
  auto answers = session.decide({
      boolean("Does the last request need a shell on a machine?").probed("shell"),
      boolean("Would carrying out the last request destroy or overwrite something that cannot easily be brought back?")
          .probed("destructive"),
  });
  if (!answers) return std::unexpected(answers.error());
  const Answer &shell = (*answers)[0], &destructive = (*answers)[1];
  double bar = shell.from_probe && destructive.from_probe ? request_at : deny_at;
  if (std::min(shell.mass, destructive.mass) < KNOWN_FROM) bar = std::min(request_at, deny_at);
  Routing routing = shell.yes < 0.5 ? next("no-shell") : destructive.yes >= bar ? refuse() : next("shell-ok");
  return std::move(routing).label("shell", shell.yes).label("destructive", destructive.yes);
}

static Result<Routing> route(const Request &request, const Session &session) {
  const std::string tools = config("tools").value_or("bash,shell,sh,exec,terminal");
  auto deny_at = config_within("deny-at", 0.8, 0, 1), request_at = config_within("deny-request-at", 0.5, 0, 1);
  if (!deny_at) return std::unexpected(deny_at.error());
  if (!request_at) return std::unexpected(request_at.error());

  std::vector<std::string_view> calls;
  for (const ToolCall *call : request.pending_calls())
    if (rules::listed(tools, text(call->name))) calls.push_back(text(call->arguments));
  if (calls.empty()) {
    std::string_view asked = request.last_user();
    if (rules::orders_destruction(asked)) return reject(403, "shell-risk", "The command destroys data; ask a person.");
    double share = rules::destroys(asked) ? 0.5 : 1;
    return judge_request(session, share * *request_at, share * *deny_at);
  }
  bool only_reads = true, destroys = false;
  std::string commands;
  for (std::string_view call : calls) {
    if (call.size() > LONGEST) return reject(403, "shell-unreadable", "The command is too long to be judged.");
    destroys = destroys || rules::destroys(call);
    only_reads = only_reads && rules::only_reads(call);
    commands += (commands.empty() ? "" : " and ") + std::string(call);
  }
  if (destroys) return reject(403, "shell-risk", "The command destroys data; ask a person.");
  if (only_reads) return next("read-only");
  return judge(session, "this tool call: " + commands, *deny_at);
}

FP_POLICY(route)
