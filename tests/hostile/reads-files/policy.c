// A policy that reads a file of the server's machine on its way: its component imports WASI, which grants nothing.
#include "forkpoint.h"
#include <stdio.h>

static bool route(fp_request *request, fp_session session, fp_routing *routing, policy_string_t *error) {
  char line[256] = "nothing";
  FILE *file = fopen("/etc/passwd", "r");
  if (file) {
    if (!fgets(line, sizeof line, file)) line[0] = 0;
    fclose(file);
  }
  *routing = fp_reply(line, "read");
  return true;
}

FP_EXPORT(route)
