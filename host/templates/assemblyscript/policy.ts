// Refuses requests that would destroy data.
import { boolean, failure, fixed, Request, Routing, Session } from "forkpoint";
export { cabi_realloc } from "forkpoint";

export function route(at: usize): usize {
  return judge(new Request(at), Session.of(at)).lower();
}

function judge(request: Request, session: Session): Routing {
  if (request.lastUser == "") return Routing.reject(400, "nothing-asked", "The last turn of the user is empty.");
  const answers = session.decide([boolean("Would the last request destroy data?")]);
  if (answers === null) return Routing.error(failure);
  const destroys = answers[0].yes;
  const routing = destroys > 0.5
    ? Routing.reject(403, "destroys-data", "This would destroy data; ask a person.")
    : Routing.generate("harmless");
  return routing.label("destroys", fixed(destroys));
}
