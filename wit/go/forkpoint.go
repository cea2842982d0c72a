// Package forkpoint writes a routing policy in Go. What the values mean is the contract's to say: wit/policy.wit.
//
//	package main
//
//	import fp "github.com/forkpoint/forkpoint/wit/go"
//
//	func init() { fp.Policy(route) }
//	func main() {}
//
//	func route(request *fp.Request, session *fp.Session) (fp.Routing, error) {
//		return fp.Next("no-opinion"), nil
//	}
//
// `forkpoint policy build` adds the packages under `bindings`. There is no time, no file and no standard output; a
// panic of the policy's is its error.
package forkpoint

import (
	"fmt"
	"math"
	"strconv"
	"strings"

	"github.com/forkpoint/forkpoint/wit/go/bindings/export_wit_world"
	dispatch "github.com/forkpoint/forkpoint/wit/go/bindings/forkpoint_policy_dispatch"
	engine "github.com/forkpoint/forkpoint/wit/go/bindings/forkpoint_policy_engine"
	host "github.com/forkpoint/forkpoint/wit/go/bindings/forkpoint_policy_host"
	contract "github.com/forkpoint/forkpoint/wit/go/bindings/forkpoint_policy_types"
	_ "github.com/forkpoint/forkpoint/wit/go/bindings/wit_exports"
	"github.com/forkpoint/forkpoint/wit/go/types"
)

// The contract's own types.
type (
	Request  = contract.Request
	Message  = contract.Message
	ToolCall = contract.ToolCall
	Session  = engine.Session
	Question = engine.Question
	Rung     = engine.Rung
)

// Who speaks in a turn.
const (
	RoleSystem    = contract.RoleSystem
	RoleUser      = contract.RoleUser
	RoleAssistant = contract.RoleAssistant
	RoleTool      = contract.RoleTool
)

// What an answer was read from.
const (
	RungLabels = engine.RungLabels
	RungProbe  = engine.RungProbe
)

// Policy makes a function the component's `route`. Its error takes the policy's fallback.
func Policy(route func(request *Request, session *Session) (Routing, error)) {
	export_wit_world.Policy = func(request *Request, session *Session) (plan dispatch.Routing, err error) {
		defer func() {
			if cause := recover(); cause != nil {
				err = fmt.Errorf("panic: %v", cause)
			}
		}()
		routing, err := route(request, session)
		return dispatch.Routing(routing), err
	}
}

// LastUser is the text of the user's last turn, or "".
func LastUser(request *Request) string {
	for i := len(request.Messages) - 1; i >= 0; i-- {
		if request.Messages[i].Role == RoleUser {
			return request.Messages[i].Content
		}
	}
	return ""
}

// PendingCalls are the calls that the model proposed last and that no tool has answered yet.
func PendingCalls(request *Request) []ToolCall {
	at := len(request.Messages) - 1
	for at >= 0 && len(request.Messages[at].ToolCalls) == 0 {
		at--
	}
	if at < 0 {
		return nil
	}
	answered := map[string]bool{}
	for _, turn := range request.Messages[at:] {
		if turn.ToolCallId.IsSome() {
			answered[turn.ToolCallId.Some()] = true
		}
	}
	var pending []ToolCall
	for _, call := range request.Messages[at].ToolCalls {
		if !answered[call.Id] {
			pending = append(pending, call)
		}
	}
	return pending
}

// Boolean is a yes-or-no question.
func Boolean(instructions string) Question {
	return Question{Instructions: instructions, Criteria: engine.MakeCriteriaBoolean(engine.BooleanSides{})}
}

// Option is what a choice may answer; Means may be empty.
type Option struct{ Name, Means string }

// Choice is one of 1 to 26 options.
func Choice(instructions string, options ...Option) Question {
	list := make([]engine.ChoiceOption, len(options))
	for i, option := range options {
		list[i].Name = option.Name
		if option.Means != "" {
			list[i].Description = types.Some(option.Means)
		}
	}
	return Question{Instructions: instructions, Criteria: engine.MakeCriteriaChoice(list)}
}

// Score is a place on a scale of 2 to 10 levels, lowest first.
func Score(instructions string, levels ...string) Question {
	return Question{Instructions: instructions, Criteria: engine.MakeCriteriaScore(levels)}
}

// Probed has a question answered by the probe of this name, which costs no tokens.
func Probed(probe string, question Question) Question {
	question.Probe = types.Some(probe)
	return question
}

// Answer is what a question got.
type Answer struct {
	Yes           float64   // The probability of yes; NaN unless the question was a boolean.
	Level         float64   // The expected level, from 0; NaN unless the question was a score.
	Choice        string    // The likeliest option; "" unless the question was a choice.
	Probabilities []float64 // Of options or levels, in the order asked.
	Confidence    float64   // From 0, all answers alike, to 1.
	Mass          float64   // Low means unsure, whatever the confidence says.
	Rung          Rung
}

// Decide answers questions about a session in one engine step.
func Decide(session *Session, questions ...Question) ([]Answer, error) {
	result := engine.Decide(session, questions)
	if result.IsErr() {
		return nil, failed(result.Err())
	}
	answers := make([]Answer, len(result.Ok()))
	for i, got := range result.Ok() {
		answer := Answer{Yes: math.NaN(), Level: math.NaN(), Mass: got.Mass, Rung: got.Rung}
		switch got.Verdict.Tag() {
		case engine.VerdictChoice:
			choice := got.Verdict.Choice()
			answer.Choice, answer.Probabilities, answer.Confidence = choice.Choice, choice.Probabilities, choice.Confidence
		case engine.VerdictBoolean:
			answer.Yes = got.Verdict.Boolean()
			answer.Confidence = math.Abs(2*answer.Yes - 1)
		case engine.VerdictScore:
			score := got.Verdict.Score()
			answer.Level, answer.Probabilities, answer.Confidence = score.Score, score.Probabilities, score.Confidence
		}
		answers[i] = answer
	}
	return answers, nil
}

// Draft writes a reply in a session, which then holds it: usually a fork.
func Draft(session *Session, sampling contract.Sampling) (engine.Completion, error) {
	result := engine.Generate(session, sampling)
	if result.IsErr() {
		return engine.Completion{}, failed(result.Err())
	}
	return result.Ok(), nil
}

// Fork is a child of a session, which continues from where it is.
func Fork(session *Session) (*Session, error) {
	result := session.Fork()
	if result.IsErr() {
		return nil, failed(result.Err())
	}
	return result.Ok(), nil
}

func failed(failure engine.Failure) error {
	switch failure.Tag() {
	case engine.FailureInvalid:
		return fmt.Errorf("invalid: %s", failure.Invalid())
	case engine.FailureFull:
		return fmt.Errorf("full: %s", failure.Full())
	case engine.FailureBudget:
		return fmt.Errorf("budget: %s", failure.Budget())
	case engine.FailureDenied:
		return fmt.Errorf("denied: %s", failure.Denied())
	default:
		return fmt.Errorf("unavailable: %s", failure.Unavailable())
	}
}

// Routing is a plan and why.
type Routing dispatch.Routing

// Generate replies from the session's own model, with what the client asked for.
func Generate(reason string) Routing {
	return Routing{Plan: dispatch.MakePlanGenerate(dispatch.Generation{}), Reason: reason}
}

// GenerateWith replies from a model in this process, as `how` says.
func GenerateWith(how dispatch.Generation, reason string) Routing {
	return Routing{Plan: dispatch.MakePlanGenerate(how), Reason: reason}
}

// Forward sends the request to an upstream that the operator named; `model` may be "".
func Forward(upstream, model, reason string) Routing {
	plan := dispatch.Forward{Upstream: upstream}
	if model != "" {
		plan.Model = types.Some(model)
	}
	return Routing{Plan: dispatch.MakePlanForward(plan), Reason: reason}
}

// Reply answers with this text; no model runs.
func Reply(text, reason string) Routing {
	return Routing{Plan: dispatch.MakePlanReply(text), Reason: reason}
}

// Reject refuses, with an HTTP status of 400 to 599, a code for programs and a sentence for people.
func Reject(status uint16, code, message string) Routing {
	rejection := dispatch.Rejection{Status: status, Code: code, Message: message}
	return Routing{Plan: dispatch.MakePlanReject(rejection), Reason: code}
}

// Next has no opinion: the next policy of the chain is asked.
func Next(reason string) Routing {
	return Routing{Plan: dispatch.MakePlanNext(), Reason: reason}
}

// Label adds a name and value to the journal.
func (r Routing) Label(name, value string) Routing {
	r.Labels = append(r.Labels, types.Tuple2[string, string]{F0: name, F1: value})
	return r
}

// Config is a value of the policy's configuration, or `otherwise`.
func Config(key, otherwise string) string { return host.Config(key).SomeOr(otherwise) }

// ConfigNumber is a value of the policy's configuration, or `otherwise`. A value that is no number is an error.
func ConfigNumber(key string, otherwise float64) (float64, error) {
	value := host.Config(key)
	if !value.IsSome() {
		return otherwise, nil
	}
	number, err := strconv.ParseFloat(strings.TrimSpace(value.Some()), 64)
	if err != nil {
		return 0, fmt.Errorf("config %s = %q: not a number", key, value.Some())
	}
	return number, nil
}

// ConfigWithin is the same from `least` to `most`. A threshold beyond them, or a NaN, would hold for nothing: it is an
// error.
func ConfigWithin(key string, otherwise, least, most float64) (float64, error) {
	number, err := ConfigNumber(key, otherwise)
	if err == nil && !(number >= least && number <= most) {
		err = fmt.Errorf("config %s = %v: must lie between %v and %v", key, number, least, most)
	}
	return number, err
}

// Log writes a line to the server's log.
func Log(message string) { host.Log(host.LevelInfo, message) }
