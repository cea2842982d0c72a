// What a command's text says by itself. The lists are those of ../rust/src/rules.rs.
#ifndef RULES_H
#define RULES_H

#include <ctype.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

// A copy with a zero at its end; never freed, as an instance lives for one request.
static inline char *rules_text(const uint8_t *bytes, size_t length) {
  char *out = malloc(length + 1);
  if (!out) abort();
  memcpy(out, bytes, length);
  out[length] = 0;
  return out;
}

// Whether the text holds a command that destroys: spaces counted once, letters in any case, and backslashes left out,
// since JSON and shells both let them stand before letters that need none.
static inline bool rules_destroys(const char *text) {
  static const char *parts[] = {"rm -rf /",   "rm -fr /", "rm -rf ~", "rm -rf *", "--no-preserve-root", "mkfs", "wipefs",
                                "of=/dev/", "> /dev/sd", ":(){",     "drop database", "shred "};
  char *plain = malloc(strlen(text) + 1), *to = plain;
  if (!plain) abort();
  for (; *text; text++) {
    if (*text == '\\') continue;
    if (!isspace((unsigned char)*text)) *to++ = (char)tolower((unsigned char)*text);
    else if (to > plain && to[-1] != ' ') *to++ = ' ';
  }
  while (to > plain && to[-1] == ' ') to--;
  *to = 0;
  bool found = false;
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) found = found || strstr(plain, parts[i]);
  free(plain);
  return found;
}

// Whether a short text orders what destroys. A long one may quote it, in a log or a file, and one that asks about it
// does no harm: both are left to the questions.
static inline bool rules_orders_destruction(const char *text) {
  static const char *asks[] = {"explain", "what", "why", "how", "describe", "tell me"};
  if (strlen(text) > 200 || !rules_destroys(text)) return false;
  while (isspace((unsigned char)*text)) text++;
  for (size_t i = 0; i < sizeof asks / sizeof *asks; i++)
    if (strncasecmp(text, asks[i], strlen(asks[i])) == 0) return false;
  return true;
}

// Trims spaces off both ends, in place.
static inline char *rules_trim(char *text) {
  while (isspace((unsigned char)*text)) text++;
  char *end = text + strlen(text);
  while (end > text && isspace((unsigned char)end[-1])) end--;
  *end = 0;
  return text;
}

// The text between two characters that stand at its ends, or NULL; in place.
static inline char *rules_inside(char *text, char first, char last) {
  size_t length = strlen(text);
  if (length < 2 || text[0] != first || text[length - 1] != last) return NULL;
  text[length - 1] = 0;
  return text + 1;
}

// Whether a tool call's arguments, {"command": "…"} and nothing else, hold one command that only reads.
static inline bool rules_only_reads(const char *arguments) {
  static const char *reads[] = {"ls", "cat", "pwd", "head", "tail", "wc", "grep", "stat", "whoami", "git status"};
  char *inside = rules_inside(rules_trim(rules_text((const uint8_t *)arguments, strlen(arguments))), '{', '}');
  char *colon = inside ? strchr(inside, ':') : NULL;
  if (!colon) return false;
  *colon = 0;
  const char *name = rules_trim(inside);
  if (strcmp(name, "\"command\"") && strcmp(name, "\"cmd\"")) return false;
  char *command = rules_inside(rules_trim(colon + 1), '"', '"');
  // A quote inside would end the string early; the other signs chain, redirect or substitute.
  if (!command || strpbrk(command, "\";|&><`$\n\\")) return false;
  command = rules_trim(command);
  for (size_t i = 0; i < sizeof reads / sizeof *reads; i++) {
    size_t length = strlen(reads[i]);
    if (strncmp(command, reads[i], length) == 0 && (command[length] == 0 || command[length] == ' ')) return true;
  }
  return false;
}

#endif
