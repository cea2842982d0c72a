// Refuses requests that would destroy data.
import { boolean, decide, generate, lastUser, reject } from "forkpoint-policy";

export function route(request, session) {
  if (lastUser(request) === "") return reject(400, "nothing-asked", "The last turn of the user is empty.");
  const [destroys] = decide(session, [boolean("Would the last request destroy data?")]);
  const labels = { destroys: destroys.yes.toFixed(2) };
  if (destroys.yes > 0.5) return reject(403, "destroys-data", "This would destroy data; ask a person.", labels);
  return generate("harmless", labels);
}
