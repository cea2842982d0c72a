package main

import (
	"slices"
	"strings"
)

// The lists are those of ../rust/src/rules.rs.
var (
	// Parts of commands that destroy whatever surrounds them.
	destroying = []string{"rm -rf /", "rm -fr /", "rm -rf ~", "rm -rf *", "--no-preserve-root", "mkfs", "wipefs",
		"of=/dev/", "> /dev/sd", ":(){", "drop database", "shred "}
	// Commands that only read, as long as nothing follows them.
	reads = []string{"ls", "cat", "pwd", "head", "tail", "wc", "grep", "stat", "whoami", "git status"}
	asks  = []string{"explain", "what", "why", "how", "describe", "tell me"}
)

// destroys says whether the text holds a command that destroys: spaces counted once, letters in any case, and
// backslashes left out, since JSON and shells both let them stand before letters that need none.
func destroys(text string) bool {
	plain := strings.ToLower(strings.Join(strings.Fields(strings.ReplaceAll(text, `\`, "")), " "))
	return slices.ContainsFunc(destroying, func(part string) bool { return strings.Contains(plain, part) })
}

// ordersDestruction says whether a short text orders what destroys. A long one may quote it, in a log or a file, and
// one that asks about it does no harm: both are left to the questions.
func ordersDestruction(text string) bool {
	start := strings.ToLower(strings.TrimSpace(text))
	asked := slices.ContainsFunc(asks, func(word string) bool { return strings.HasPrefix(start, word) })
	return len(text) <= 200 && destroys(text) && !asked
}

// onlyReads says whether a tool call's arguments, {"command": "…"} and nothing else, hold one command that only reads.
func onlyReads(arguments string) bool {
	inside, ok := between(strings.TrimSpace(arguments), "{", "}")
	name, value, found := strings.Cut(inside, ":")
	name = strings.TrimSpace(name)
	if !ok || !found || name != `"command"` && name != `"cmd"` {
		return false
	}
	command, ok := between(strings.TrimSpace(value), `"`, `"`)
	// A quote inside would end the string early; the other signs chain, redirect or substitute.
	if !ok || strings.ContainsAny(command, "\";|&><`$\n\\") {
		return false
	}
	command = strings.TrimSpace(command)
	return slices.ContainsFunc(reads, func(known string) bool {
		return command == known || strings.HasPrefix(command, known+" ")
	})
}

// between is the text between two that stand at its ends.
func between(text, first, last string) (string, bool) {
	if len(text) < 2 || !strings.HasPrefix(text, first) || !strings.HasSuffix(text, last) {
		return "", false
	}
	return text[1 : len(text)-1], true
}
