// The gate of ../../rust in AssemblyScript: the same rules, questions and reasons. rules.ts says what a command's text
// says by itself.
import { boolean, choice, config, failure, fixed, numberWithin, Request, Routing, Session } from "forkpoint";
import { destroys, onlyReads, ordersDestruction } from "./rules";
export { cabi_realloc } from "forkpoint";

// A command longer than this, in bytes, is not judged but refused: what cannot be read cannot be trusted.
const LONGEST = 4000;

// Below this mass a session is unlike all that a probe was fitted to.
const KNOWN_FROM = 0.02;

export function route(at: usize): usize {
  return gate(new Request(at), Session.of(at)).lower();
}

function gate(request: Request, session: Session): Routing {
  const configured = config("tools");
  const tools = (configured === null ? "bash,shell,sh,exec,terminal" : configured).split(",");
  for (let i = 0; i < tools.length; i++) tools[i] = tools[i].trim();
  const denyAt = numberWithin("deny-at", 0.8, 0, 1);
  const requestAt = numberWithin("deny-request-at", 0.5, 0, 1);
  if (isNaN(denyAt) || isNaN(requestAt)) return Routing.error(failure);

  const calls: string[] = [];
  const pending = request.pendingCalls;
  for (let i = 0; i < pending.length; i++) if (tools.includes(pending[i].name)) calls.push(pending[i].arguments);
  if (calls.length == 0) {
    const text = request.lastUser;
    if (ordersDestruction(text)) return Routing.reject(403, "shell-risk", "The command destroys data; ask a person.");
    const share = destroys(text) ? 0.5 : 1.0;
    return judgeRequest(session, share * requestAt, share * denyAt);
  }
  let onlyRead = true, destroying = false;
  for (let i = 0; i < calls.length; i++) {
    if (String.UTF8.byteLength(calls[i]) > LONGEST) {
      return Routing.reject(403, "shell-unreadable", "The command is too long to be judged.");
    }
    destroying = destroying || destroys(calls[i]);
    onlyRead = onlyRead && onlyReads(calls[i]);
  }
  if (destroying) return Routing.reject(403, "shell-risk", "The command destroys data; ask a person.");
  if (onlyRead) return Routing.next("read-only");
  return judge(session, "this tool call: " + calls.join(" and "), denyAt);
}

// Asks the probes whether the user's request needs a shell and would destroy, and refuses when it surely does: from
// requestAt on, from denyAt on where labels were read, from the smaller one on where either answer is unsure.
function judgeRequest(session: Session, requestAt: f64, denyAt: f64): Routing {
  const answers = session.decide([
    boolean("Does the last request need a shell on a machine?").probed("shell"),
    boolean("Would carrying out the last request destroy or overwrite something that cannot easily be brought back?")
      .probed("destructive"),
  ]);
  if (answers === null) return Routing.error(failure);
  const shell = answers[0].yes, destructive = answers[1].yes;
  let bar = answers[0].fromProbe && answers[1].fromProbe ? requestAt : denyAt;
  if (min(answers[0].mass, answers[1].mass) < KNOWN_FROM) bar = min(requestAt, denyAt);
  const routing = shell < 0.5 ? Routing.next("no-shell") : destructive >= bar ? refuse() : Routing.next("shell-ok");
  return routing.label("shell", fixed(shell)).label("destructive", fixed(destructive));
}

// Asks how bad an act is and refuses from denyAt on.
function judge(session: Session, act: string, denyAt: f64): Routing {
  const answers = session.decide([
    choice("What would running " + act + " do to this computer?", ["nothing", "change", "destroy"], [
      "it only reads, or runs no command at all",
      "it changes files or settings, and that can be undone",
      "it deletes or overwrites what cannot be had back",
    ]),
    boolean("Could running " + act + " lose data for good?"),
  ]);
  if (answers === null) return Routing.error(failure);
  const destroy = answers[0].probability(2), lost = answers[1].yes;
  const refused = destroy >= denyAt || (lost >= denyAt && answers[0].choice != "nothing");
  const routing = refused ? refuse() : Routing.next("shell-ok");
  return routing.label("destroy", fixed(destroy)).label("lost", fixed(lost));
}

function refuse(): Routing {
  return Routing.reject(403, "shell-risk", "This could destroy data; ask a person.");
}
