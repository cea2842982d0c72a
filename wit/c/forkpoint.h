// Helpers for policies in C over the bindings that `forkpoint policy bindgen c` writes. What the values mean is the
// contract's to say: wit/policy.wit.
//
// A policy is a function that FP_EXPORT exports. Who frees what: text in questions is only lent, so literals will do;
// text in a plan is taken and freed by the bindings, so the helpers copy it.
#ifndef FORKPOINT_H
#define FORKPOINT_H

#include "policy.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef forkpoint_policy_types_request_t fp_request;
typedef forkpoint_policy_types_message_t fp_message;
typedef forkpoint_policy_types_tool_call_t fp_tool_call;
typedef forkpoint_policy_engine_question_t fp_question;
typedef forkpoint_policy_engine_choice_option_t fp_option;
typedef forkpoint_policy_engine_list_answer_t fp_answers;
typedef forkpoint_policy_engine_borrow_session_t fp_session;
typedef forkpoint_policy_dispatch_routing_t fp_routing;

// Exports `route` as the component's. What the session is asked is asked of a borrow, so the policy sees it as one.
#define FP_EXPORT(route)                                                                                     \
  bool exports_policy_route(fp_request *request, forkpoint_policy_engine_own_session_t own, fp_routing *routing,              \
                            policy_string_t *error) {                                                        \
    return route(request, forkpoint_policy_engine_borrow_session(own), routing, error);                      \
  }

// Text that is lent: it must outlive the call that it goes into.
static inline policy_string_t fp_lend(const char *text) {
  return (policy_string_t){(uint8_t *)text, strlen(text)};
}

// A copy that the bindings will free.
static inline policy_string_t fp_copy(const char *text) {
  policy_string_t copy;
  policy_string_dup(&copy, text);
  return copy;
}

static inline bool fp_is(policy_string_t text, const char *other) {
  return text.len == strlen(other) && memcmp(text.ptr, other, text.len) == 0;
}

// The text of the user's last turn, or nothing; not zero-terminated.
static inline policy_string_t fp_last_user(const fp_request *request) {
  for (size_t i = request->messages.len; i-- > 0;) {
    const fp_message *turn = &request->messages.ptr[i];
    if (turn->role == FORKPOINT_POLICY_TYPES_ROLE_USER) return turn->content;
  }
  return (policy_string_t){NULL, 0};
}

// A yes-or-no question.
static inline fp_question fp_boolean(const char *instructions) {
  return (fp_question){.instructions = fp_lend(instructions), .criteria = {.tag = FORKPOINT_POLICY_ENGINE_CRITERIA_BOOLEAN}};
}

// An option of a choice; `description` may be NULL.
static inline fp_option fp_opt(const char *name, const char *description) {
  fp_option option = {.name = fp_lend(name)};
  option.description.is_some = description != NULL;
  if (description) option.description.val = fp_lend(description);
  return option;
}

// One of 1 to 26 options, which are lent.
static inline fp_question fp_choice(const char *instructions, fp_option *options, size_t count) {
  return (fp_question){.instructions = fp_lend(instructions),
                       .criteria = {.tag = FORKPOINT_POLICY_ENGINE_CRITERIA_CHOICE, .val.choice = {options, count}}};
}

// Has a question answered by the probe of this name, which costs no tokens: the policy ships its examples.
static inline fp_question fp_probed(const char *probe, fp_question question) {
  question.probe.is_some = true;
  question.probe.val = fp_lend(probe);
  return question;
}

// The kind and text of an engine's refusal, as a policy's error.
static inline policy_string_t fp_error(const forkpoint_policy_engine_failure_t *failure) {
  static const char *kinds[] = {"invalid: ", "full: ", "budget: ", "denied: ", "unavailable: "};
  const char *kind = kinds[failure->tag];
  policy_string_t text = failure->val.invalid; // every case holds text alone
  policy_string_t out = {malloc(strlen(kind) + text.len), strlen(kind) + text.len};
  memcpy(out.ptr, kind, strlen(kind));
  memcpy(out.ptr + strlen(kind), text.ptr, text.len);
  return out;
}

// Answers questions in one engine step. False: `error` says why. Free `answers` with
// forkpoint_policy_engine_list_answer_free.
static inline bool fp_decide(fp_session session, fp_question *questions, size_t count, fp_answers *answers,
                             policy_string_t *error) {
  forkpoint_policy_engine_list_question_t list = {questions, count};
  forkpoint_policy_engine_failure_t failure;
  if (forkpoint_policy_engine_decide(session, &list, answers, &failure)) return true;
  *error = fp_error(&failure);
  forkpoint_policy_engine_failure_free(&failure);
  return false;
}

// Has no opinion: the next policy of the chain is asked.
static inline fp_routing fp_next(const char *reason) {
  return (fp_routing){.plan = {.tag = FORKPOINT_POLICY_DISPATCH_PLAN_NEXT}, .reason = fp_copy(reason)};
}

// Refuses, with an HTTP status of 400 to 599, a code for programs and a sentence for people.
static inline fp_routing fp_reject(uint16_t status, const char *code, const char *message) {
  fp_routing routing = {.plan = {.tag = FORKPOINT_POLICY_DISPATCH_PLAN_REJECT}, .reason = fp_copy(code)};
  routing.plan.val.reject = (forkpoint_policy_dispatch_rejection_t){status, fp_copy(code), fp_copy(message)};
  return routing;
}

// Answers with this text; no model runs.
static inline fp_routing fp_reply(const char *text, const char *reason) {
  fp_routing routing = {.plan = {.tag = FORKPOINT_POLICY_DISPATCH_PLAN_REPLY}, .reason = fp_copy(reason)};
  routing.plan.val.reply = fp_copy(text);
  return routing;
}

// Replies from the session's own model, with what the client asked for.
static inline fp_routing fp_generate(const char *reason) {
  return (fp_routing){.plan = {.tag = FORKPOINT_POLICY_DISPATCH_PLAN_GENERATE}, .reason = fp_copy(reason)};
}

// Sends the request to an upstream that the operator named; `model` may be NULL.
static inline fp_routing fp_forward(const char *upstream, const char *model, const char *reason) {
  fp_routing routing = {.plan = {.tag = FORKPOINT_POLICY_DISPATCH_PLAN_FORWARD}, .reason = fp_copy(reason)};
  routing.plan.val.forward.upstream = fp_copy(upstream);
  routing.plan.val.forward.model.is_some = model != NULL;
  if (model) routing.plan.val.forward.model.val = fp_copy(model);
  return routing;
}

// A number of the policy's configuration, or `otherwise`. False for what is no number from `least` to `most`, a NaN
// included: `error` says so.
static inline bool fp_config_within(const char *key, double otherwise, double least, double most, double *value,
                                    policy_string_t *error) {
  policy_string_t name = fp_lend(key), text;
  *value = otherwise;
  if (!forkpoint_policy_host_config(&name, &text)) return true;
  char digits[64] = "", reason[192], *end = digits;
  // What is longer is no number that anyone writes.
  if (text.len < sizeof digits) memcpy(digits, text.ptr, text.len);
  *value = strtod(digits, &end);
  const bool read = end != digits && (size_t)(end - digits) == text.len;
  policy_string_free(&text);
  if (read && *value >= least && *value <= most) return true;
  if (read) snprintf(reason, sizeof reason, "config %s = %s: must lie between %g and %g", key, digits, least, most);
  else snprintf(reason, sizeof reason, "config %s = \"%s\": not a number", key, digits);
  *error = fp_copy(reason);
  return false;
}

// Adds a name and value to the journal.
static inline void fp_label(fp_routing *routing, const char *name, const char *value) {
  size_t count = routing->labels.len + 1;
  routing->labels.ptr = realloc(routing->labels.ptr, count * sizeof *routing->labels.ptr);
  if (!routing->labels.ptr) abort();
  routing->labels.ptr[count - 1] = (policy_tuple2_string_string_t){fp_copy(name), fp_copy(value)};
  routing->labels.len = count;
}

#endif
