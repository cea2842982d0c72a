// Helpers for policies in C++23 over the bindings for C that `forkpoint policy build` makes. What the values mean is
// the contract's to say: wit/policy.wit.
//
// A policy is a function that FP_POLICY exports. There are no exceptions: what may fail returns a std::expected, whose
// error takes the policy's fallback when `route` returns it.
#ifndef FORKPOINT_HPP
#define FORKPOINT_HPP

extern "C" {
#include "policy.h"
}

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <expected>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace forkpoint {

template <class T> using Result = std::expected<T, std::string>;
using ToolCall = forkpoint_policy_types_tool_call_t;
using Message = forkpoint_policy_types_message_t;

// Text of the bindings, which lives as long as the call.
inline std::string_view text(const policy_string_t &string) {
  return {reinterpret_cast<const char *>(string.ptr), string.len};
}

// Text that is lent to the bindings.
inline policy_string_t lend(std::string_view text) {
  return {reinterpret_cast<uint8_t *>(const_cast<char *>(text.data())), text.size()};
}

// A copy that the bindings free.
inline policy_string_t copy(std::string_view text) {
  policy_string_t out;
  policy_string_dup_n(&out, text.data(), text.size());
  return out;
}

// What the client asked for.
struct Request {
  const forkpoint_policy_types_request_t &raw;

  std::span<const Message> messages() const { return {raw.messages.ptr, raw.messages.len}; }

  // The text of the user's last turn, or "".
  std::string_view last_user() const {
    for (size_t i = raw.messages.len; i-- > 0;)
      if (raw.messages.ptr[i].role == FORKPOINT_POLICY_TYPES_ROLE_USER) return text(raw.messages.ptr[i].content);
    return {};
  }

  // The calls that the model proposed last and that no tool has answered yet.
  std::vector<const ToolCall *> pending_calls() const {
    size_t end = raw.messages.len;
    while (end > 0 && raw.messages.ptr[end - 1].tool_calls.len == 0) end--;
    std::vector<const ToolCall *> pending;
    if (end == 0) return pending;
    const auto &calls = raw.messages.ptr[end - 1].tool_calls;
    for (const ToolCall &call : std::span(calls.ptr, calls.len)) {
      bool answered = false;
      for (const Message &turn : messages().subspan(end - 1))
        answered = answered || (turn.tool_call_id.is_some && text(turn.tool_call_id.val) == text(call.id));
      if (!answered) pending.push_back(&call);
    }
    return pending;
  }

  // The first value of a header, whose name is in lower case.
  std::optional<std::string_view> header(std::string_view name) const {
    for (const auto &[key, value] : std::span(raw.headers.ptr, raw.headers.len))
      if (text(key) == name) return text(value);
    return std::nullopt;
  }
};

// An option of a choice; what it means may be left out.
struct Option {
  std::string name, means;
};

// What is asked.
struct Question {
  enum class Kind { boolean, choice, score } kind;
  std::string instructions;
  std::vector<Option> options; // of a choice; of a score the levels, lowest first
  std::string probe;

  // Has the question answered by the probe of this name, which costs no tokens.
  Question probed(std::string name) && {
    probe = std::move(name);
    return std::move(*this);
  }
};

inline Question boolean(std::string instructions) { return {Question::Kind::boolean, std::move(instructions), {}, {}}; }
inline Question choice(std::string instructions, std::vector<Option> options) {
  return {Question::Kind::choice, std::move(instructions), std::move(options), {}};
}
inline Question score(std::string instructions, std::vector<Option> levels) {
  return {Question::Kind::score, std::move(instructions), std::move(levels), {}};
}

// What a question got.
struct Answer {
  double yes = NAN;                  // the probability of yes; NaN unless the question was a boolean
  double level = NAN;                // the expected level, from 0; NaN unless the question was a score
  std::string choice;                // the likeliest option; empty unless the question was a choice
  std::vector<double> probabilities; // of options or levels, in the order asked
  double confidence = 0;             // from 0, all answers alike, to 1
  double mass = 0;                   // low means unsure, whatever the confidence says
  bool from_probe = false;           // rather than from the probabilities of labels
};

inline std::string explain(const forkpoint_policy_engine_failure_t &failure) {
  static constexpr const char *kinds[] = {"invalid: ", "full: ", "budget: ", "denied: ", "unavailable: "};
  return kinds[failure.tag] + std::string(text(failure.val.invalid)); // every case holds text alone
}

// The request's session, or a fork of one.
struct Session {
  forkpoint_policy_engine_borrow_session_t raw;

  // Answers questions in one engine step.
  Result<std::vector<Answer>> decide(const std::vector<Question> &questions) const {
    std::vector<forkpoint_policy_engine_question_t> asked(questions.size());
    std::vector<std::vector<forkpoint_policy_engine_choice_option_t>> options(questions.size());
    std::vector<std::vector<policy_string_t>> levels(questions.size());
    for (size_t i = 0; i < questions.size(); i++) {
      const Question &question = questions[i];
      auto &out = asked[i] = {};
      out.instructions = lend(question.instructions);
      out.probe = {!question.probe.empty(), lend(question.probe)};
      if (question.kind == Question::Kind::boolean) {
        out.criteria.tag = FORKPOINT_POLICY_ENGINE_CRITERIA_BOOLEAN;
      } else if (question.kind == Question::Kind::choice) {
        for (const Option &option : question.options)
          options[i].push_back({lend(option.name), {!option.means.empty(), lend(option.means)}});
        out.criteria.tag = FORKPOINT_POLICY_ENGINE_CRITERIA_CHOICE;
        out.criteria.val.choice = {options[i].data(), options[i].size()};
      } else {
        for (const Option &level : question.options) levels[i].push_back(lend(level.name));
        out.criteria.tag = FORKPOINT_POLICY_ENGINE_CRITERIA_SCORE;
        out.criteria.val.score = {levels[i].data(), levels[i].size()};
      }
    }
    forkpoint_policy_engine_list_question_t list = {asked.data(), asked.size()};
    forkpoint_policy_engine_list_answer_t got;
    forkpoint_policy_engine_failure_t failure;
    if (!forkpoint_policy_engine_decide(raw, &list, &got, &failure)) return std::unexpected(explain(failure));
    std::vector<Answer> answers;
    for (const auto &answer : std::span(got.ptr, got.len)) answers.push_back(read(answer));
    forkpoint_policy_engine_list_answer_free(&got);
    return answers;
  }

private:
  static Answer read(const forkpoint_policy_engine_answer_t &answer) {
    Answer out;
    const auto &verdict = answer.verdict;
    if (verdict.tag == FORKPOINT_POLICY_ENGINE_VERDICT_BOOLEAN) {
      out.yes = verdict.val.boolean;
      out.confidence = std::abs(2 * out.yes - 1);
    } else if (verdict.tag == FORKPOINT_POLICY_ENGINE_VERDICT_CHOICE) {
      const auto &choice = verdict.val.choice;
      out.choice = text(choice.choice);
      out.probabilities.assign(choice.probabilities.ptr, choice.probabilities.ptr + choice.probabilities.len);
      out.confidence = choice.confidence;
    } else {
      const auto &score = verdict.val.score;
      out.level = score.score;
      out.probabilities.assign(score.probabilities.ptr, score.probabilities.ptr + score.probabilities.len);
      out.confidence = score.confidence;
    }
    out.mass = answer.mass;
    out.from_probe = answer.rung == FORKPOINT_POLICY_ENGINE_RUNG_PROBE;
    return out;
  }
};

// A plan and why.
struct Routing {
  forkpoint_policy_dispatch_routing_t raw;

  // Adds a name and value to the journal.
  Routing label(std::string_view name, std::string_view value) && {
    auto &labels = raw.labels;
    size_t size = (labels.len + 1) * sizeof *labels.ptr;
    labels.ptr = static_cast<policy_tuple2_string_string_t *>(std::realloc(labels.ptr, size));
    if (!labels.ptr) std::abort();
    labels.ptr[labels.len++] = {copy(name), copy(value)};
    return *this;
  }

  // The same for a number, with two decimals.
  Routing label(std::string_view name, double value) && {
    char digits[32];
    std::snprintf(digits, sizeof digits, "%.2f", value);
    return std::move(*this).label(name, std::string_view(digits));
  }
};

inline Routing plan(uint8_t tag, std::string_view reason) {
  Routing out = {};
  out.raw.plan.tag = tag;
  out.raw.reason = copy(reason);
  return out;
}

// Has no opinion: the next policy of the chain is asked.
inline Routing next(std::string_view reason) { return plan(FORKPOINT_POLICY_DISPATCH_PLAN_NEXT, reason); }

// Replies from the session's own model, with what the client asked for.
inline Routing generate(std::string_view reason) { return plan(FORKPOINT_POLICY_DISPATCH_PLAN_GENERATE, reason); }

// Answers with this text; no model runs.
inline Routing reply(std::string_view words, std::string_view reason) {
  Routing out = plan(FORKPOINT_POLICY_DISPATCH_PLAN_REPLY, reason);
  out.raw.plan.val.reply = copy(words);
  return out;
}

// Refuses, with an HTTP status of 400 to 599, a code for programs and a sentence for people.
inline Routing reject(uint16_t status, std::string_view code, std::string_view message) {
  Routing out = plan(FORKPOINT_POLICY_DISPATCH_PLAN_REJECT, code);
  out.raw.plan.val.reject = {status, copy(code), copy(message)};
  return out;
}

// Sends the request to an upstream that the operator named; an empty `model` takes the upstream's own rule.
inline Routing forward(std::string_view upstream, std::string_view reason, std::string_view model = {}) {
  Routing out = plan(FORKPOINT_POLICY_DISPATCH_PLAN_FORWARD, reason);
  out.raw.plan.val.forward.upstream = copy(upstream);
  if (!model.empty()) out.raw.plan.val.forward.model = {true, copy(model)};
  return out;
}

// A value of the policy's configuration.
inline std::optional<std::string> config(std::string_view key) {
  policy_string_t name = lend(key), value;
  if (!forkpoint_policy_host_config(&name, &value)) return std::nullopt;
  return std::string(text(value));
}

// The same as a number. A value that is none is an error.
inline Result<double> config_number(std::string_view key, double otherwise) {
  const std::optional<std::string> value = config(key);
  if (!value) return otherwise;
  char *end;
  double number = std::strtod(value->c_str(), &end);
  if (end == value->c_str() || *end)
    return std::unexpected("config " + std::string(key) + " = \"" + *value + "\": not a number");
  return number;
}

// The same, from `least` to `most`. A threshold beyond them, or a NaN, would hold for nothing: it is an error.
inline Result<double> config_within(std::string_view key, double otherwise, double least, double most) {
  const Result<double> number = config_number(key, otherwise);
  if (!number || (*number >= least && *number <= most)) return number;
  char range[96];
  std::snprintf(range, sizeof range, " = %g: must lie between %g and %g", *number, least, most);
  return std::unexpected("config " + std::string(key) + range);
}

} // namespace forkpoint

// Exports `route` as the component's: Result<Routing> route(const Request &, const Session &).
#define FP_POLICY(route)                                                                                     \
  extern "C" bool exports_policy_route(forkpoint_policy_types_request_t *request,                            \
                                       forkpoint_policy_engine_own_session_t own,                            \
                                       forkpoint_policy_dispatch_routing_t *routing, policy_string_t *error) { \
    forkpoint::Session session = {forkpoint_policy_engine_borrow_session(own)};                              \
    forkpoint::Result<forkpoint::Routing> result = route(forkpoint::Request{*request}, session);             \
    if (result) *routing = result->raw;                                                                      \
    else *error = forkpoint::copy(result.error());                                                           \
    return result.has_value();                                                                               \
  }

#endif
