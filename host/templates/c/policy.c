// Refuses requests that would destroy data.
#include "forkpoint.h"
#include <stdio.h>

static bool route(fp_request *request, fp_session session, fp_routing *routing, policy_string_t *error) {
  if (fp_last_user(request).len == 0) {
    *routing = fp_reject(400, "nothing-asked", "The last turn of the user is empty.");
    return true;
  }
  fp_question question = fp_boolean("Would the last request destroy data?");
  fp_answers answers;
  if (!fp_decide(session, &question, 1, &answers, error)) return false;
  double destroys = answers.ptr[0].verdict.val.boolean;
  *routing = destroys > 0.5 ? fp_reject(403, "destroys-data", "This would destroy data; ask a person.")
                            : fp_generate("harmless");
  char text[32];
  snprintf(text, sizeof text, "%.2f", destroys);
  fp_label(routing, "destroys", text);
  return true;
}

FP_EXPORT(route)
