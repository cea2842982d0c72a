// The gate of ../rust in C: the same rules, questions and reasons, so that the two can be compared. rules.h says what a
// command's text says by itself.
#include "forkpoint.h"
#include "rules.h"
#include <stdio.h>

// A command longer than this is not judged but refused: what cannot be read cannot be trusted.
enum { LONGEST = 4000 };

// Below this mass a session is unlike all that a probe was fitted to.
#define KNOWN_FROM 0.02

// A value of the configuration, or `otherwise`. Lives until the instance ends, with the request.
static const char *config(const char *key, const char *otherwise) {
  policy_string_t name = fp_lend(key), value;
  return forkpoint_policy_host_config(&name, &value) ? rules_text(value.ptr, value.len) : otherwise;
}

// Whether `name` is in `list`, names with commas between.
static bool listed(const char *list, policy_string_t name) {
  while (*list) {
    list += strspn(list, ", ");
    size_t length = strcspn(list, ", ");
    if (length && length == name.len && memcmp(list, name.ptr, length) == 0) return true;
    list += length;
  }
  return false;
}

// Whether a tool turn from `at` on answers the call.
static bool answered(const fp_request *request, size_t at, const fp_tool_call *call) {
  for (; at < request->messages.len; at++) {
    const policy_option_string_t *id = &request->messages.ptr[at].tool_call_id;
    if (id->is_some && id->val.len == call->id.len && memcmp(id->val.ptr, call->id.ptr, call->id.len) == 0) return true;
  }
  return false;
}

// The text of the user's last turn, or "".
static const char *last_user(const fp_request *request) {
  for (size_t i = request->messages.len; i-- > 0;) {
    const fp_message *turn = &request->messages.ptr[i];
    if (turn->role == FORKPOINT_POLICY_TYPES_ROLE_USER) return rules_text(turn->content.ptr, turn->content.len);
  }
  return "";
}

// Joins texts into a new one.
static char *join(const char *first, const char *second, const char *third) {
  size_t size = strlen(first) + strlen(second) + strlen(third) + 1;
  char *out = malloc(size);
  if (!out) abort();
  snprintf(out, size, "%s%s%s", first, second, third);
  return out;
}

static void label(fp_routing *routing, const char *name, double value) {
  char text[32];
  snprintf(text, sizeof text, "%.2f", value);
  fp_label(routing, name, text);
}

// Asks how bad `act` is and refuses from `deny_at` on.
static bool judge(fp_session session, const char *act, double deny_at, fp_routing *routing, policy_string_t *error) {
  fp_option harms[] = {
      fp_opt("nothing", "it only reads, or runs no command at all"),
      fp_opt("change", "it changes files or settings, and that can be undone"),
      fp_opt("destroy", "it deletes or overwrites what cannot be had back"),
  };
  fp_question questions[] = {
      fp_choice(join("What would running ", act, " do to this computer?"), harms, 3),
      fp_boolean(join("Could running ", act, " lose data for good?")),
  };
  fp_answers answers;
  if (!fp_decide(session, questions, 2, &answers, error)) return false;
  const forkpoint_policy_engine_choice_answer_t *harm = &answers.ptr[0].verdict.val.choice;
  double destroy = harm->probabilities.ptr[2], lost = answers.ptr[1].verdict.val.boolean;
  bool refuse = destroy >= deny_at || (lost >= deny_at && !fp_is(harm->choice, "nothing"));
  *routing = refuse ? fp_reject(403, "shell-risk", "This could destroy data; ask a person.") : fp_next("shell-ok");
  label(routing, "destroy", destroy);
  label(routing, "lost", lost);
  forkpoint_policy_engine_list_answer_free(&answers);
  return true;
}

// Whether a probe answered.
static bool by_probe(const forkpoint_policy_engine_answer_t *answer) {
  return answer->rung == FORKPOINT_POLICY_ENGINE_RUNG_PROBE;
}

// Asks the probes whether the user's request needs a shell and would destroy, and refuses when it surely does: from
// `request_at` on, from `deny_at` on where labels were read, from the smaller one on where either answer is unsure.
static bool judge_request(fp_session session, double request_at, double deny_at, fp_routing *routing,
                          policy_string_t *error) {
  fp_question questions[] = {
      fp_probed("shell", fp_boolean("Does the last request need a shell on a machine?")),
      fp_probed("destructive", fp_boolean("Would carrying out the last request destroy or overwrite something that "
                                          "cannot easily be brought back?")),
  };
  fp_answers answers;
  if (!fp_decide(session, questions, 2, &answers, error)) return false;
  double shell = answers.ptr[0].verdict.val.boolean, destructive = answers.ptr[1].verdict.val.boolean;
  double bar = by_probe(&answers.ptr[0]) && by_probe(&answers.ptr[1]) ? request_at : deny_at;
  bool strange = answers.ptr[0].mass < KNOWN_FROM || answers.ptr[1].mass < KNOWN_FROM;
  if (strange && request_at < bar) bar = request_at;
  if (strange && deny_at < bar) bar = deny_at;
  bool refuse = shell >= 0.5 && destructive >= bar;
  *routing = refuse ? fp_reject(403, "shell-risk", "This could destroy data; ask a person.")
                    : fp_next(shell >= 0.5 ? "shell-ok" : "no-shell");
  label(routing, "shell", shell);
  label(routing, "destructive", destructive);
  forkpoint_policy_engine_list_answer_free(&answers);
  return true;
}

static bool route(fp_request *request, fp_session session, fp_routing *routing, policy_string_t *error) {
  const char *tools = config("tools", "bash,shell,sh,exec,terminal");
  double deny_at, request_at;
  if (!fp_config_within("deny-at", 0.8, 0, 1, &deny_at, error)) return false;
  if (!fp_config_within("deny-request-at", 0.5, 0, 1, &request_at, error)) return false;
  size_t at = request->messages.len;
  while (at > 0 && request->messages.ptr[at - 1].tool_calls.len == 0) at--;
  const char *commands = "";
  size_t pending = 0;
  bool only_reads = true;
  for (size_t i = 0; at > 0 && i < request->messages.ptr[at - 1].tool_calls.len; i++) {
    const fp_tool_call *call = &request->messages.ptr[at - 1].tool_calls.ptr[i];
    if (answered(request, at - 1, call) || !listed(tools, call->name)) continue;
    if (call->arguments.len > LONGEST) {
      *routing = fp_reject(403, "shell-unreadable", "The command is too long to be judged.");
      return true;
    }
    const char *arguments = rules_text(call->arguments.ptr, call->arguments.len);
    if (rules_destroys(arguments)) {
      *routing = fp_reject(403, "shell-risk", "The command destroys data; ask a person.");
      return true;
    }
    only_reads = only_reads && rules_only_reads(arguments);
    commands = join(commands, pending ? " and " : "", arguments);
    pending++;
  }
  if (pending == 0) {
    const char *text = last_user(request);
    if (rules_orders_destruction(text)) {
      *routing = fp_reject(403, "shell-risk", "The command destroys data; ask a person.");
      return true;
    }
    double share = rules_destroys(text) ? 0.5 : 1.0;
    return judge_request(session, share * request_at, share * deny_at, routing, error);
  }
  if (only_reads) {
    *routing = fp_next("read-only");
    return true;
  }
  return judge(session, join("this tool call: ", commands, ""), deny_at, routing, error);
}

FP_EXPORT(route)
