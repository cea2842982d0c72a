// The gate of ../rust in Go: the same rules, questions and reasons. rules.go says what a command's text says by itself.
package main

import (
	"fmt"
	"slices"
	"strings"

	fp "github.com/forkpoint/forkpoint/wit/go"
)

// A command longer than this is not judged but refused: what cannot be read cannot be trusted.
const longest = 4000

// Below this mass a session is unlike all that a probe was fitted to.
const knownFrom = 0.02

func init() { fp.Policy(route) }

func main() {}

func route(request *fp.Request, session *fp.Session) (fp.Routing, error) {
	tools := strings.Split(fp.Config("tools", "bash,shell,sh,exec,terminal"), ",")
	denyAt, err := fp.ConfigWithin("deny-at", 0.8, 0, 1)
	if err != nil {
		return fp.Routing{}, err
	}
	requestAt, err := fp.ConfigWithin("deny-request-at", 0.5, 0, 1)
	if err != nil {
		return fp.Routing{}, err
	}
	var calls []string
	for _, call := range fp.PendingCalls(request) {
		if slices.ContainsFunc(tools, func(tool string) bool { return strings.TrimSpace(tool) == call.Name }) {
			calls = append(calls, call.Arguments)
		}
	}
	if len(calls) == 0 {
		text := fp.LastUser(request)
		if ordersDestruction(text) {
			return fp.Reject(403, "shell-risk", "The command destroys data; ask a person."), nil
		}
		share := 1.0
		if destroys(text) {
			share = 0.5
		}
		return judgeRequest(session, share*requestAt, share*denyAt)
	}
	if slices.ContainsFunc(calls, func(call string) bool { return len(call) > longest }) {
		return fp.Reject(403, "shell-unreadable", "The command is too long to be judged."), nil
	}
	if slices.ContainsFunc(calls, destroys) {
		return fp.Reject(403, "shell-risk", "The command destroys data; ask a person."), nil
	}
	if !slices.ContainsFunc(calls, func(call string) bool { return !onlyReads(call) }) {
		return fp.Next("read-only"), nil
	}
	return judge(session, "this tool call: "+strings.Join(calls, " and "), denyAt)
}

// judgeRequest asks the probes whether the user's request needs a shell and would destroy, and refuses when it surely
// does: from requestAt on, from denyAt on where labels were read, from the smaller one on where either answer is
// unsure.
func judgeRequest(session *fp.Session, requestAt, denyAt float64) (fp.Routing, error) {
	answers, err := fp.Decide(session,
		fp.Probed("shell", fp.Boolean("Does the last request need a shell on a machine?")),
		fp.Probed("destructive", fp.Boolean("Would carrying out the last request destroy or overwrite something "+
			"that cannot easily be brought back?")))
	if err != nil {
		return fp.Routing{}, err
	}
	shell, destructive := answers[0], answers[1]
	bar := denyAt
	if min(shell.Mass, destructive.Mass) < knownFrom {
		bar = min(requestAt, denyAt)
	} else if shell.Rung == fp.RungProbe && destructive.Rung == fp.RungProbe {
		bar = requestAt
	}
	routing := fp.Next("shell-ok")
	if shell.Yes < 0.5 {
		routing = fp.Next("no-shell")
	} else if destructive.Yes >= bar {
		routing = fp.Reject(403, "shell-risk", "This could destroy data; ask a person.")
	}
	return label(label(routing, "shell", shell.Yes), "destructive", destructive.Yes), nil
}

// judge asks how bad an act is and refuses from denyAt on.
func judge(session *fp.Session, act string, denyAt float64) (fp.Routing, error) {
	answers, err := fp.Decide(session,
		fp.Choice("What would running "+act+" do to this computer?",
			fp.Option{Name: "nothing", Means: "it only reads, or runs no command at all"},
			fp.Option{Name: "change", Means: "it changes files or settings, and that can be undone"},
			fp.Option{Name: "destroy", Means: "it deletes or overwrites what cannot be had back"}),
		fp.Boolean("Could running "+act+" lose data for good?"))
	if err != nil {
		return fp.Routing{}, err
	}
	harm, lost := answers[0], answers[1]
	destroy := harm.Probabilities[2]
	routing := fp.Next("shell-ok")
	if destroy >= denyAt || lost.Yes >= denyAt && harm.Choice != "nothing" {
		routing = fp.Reject(403, "shell-risk", "This could destroy data; ask a person.")
	}
	return label(label(routing, "destroy", destroy), "lost", lost.Yes), nil
}

func label(routing fp.Routing, name string, value float64) fp.Routing {
	return routing.Label(name, fmt.Sprintf("%.2f", value))
}
