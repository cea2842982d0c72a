// What a command's text says by itself. The lists are those of ../rust/src/rules.rs.
#ifndef RULES_HPP
#define RULES_HPP

#include <algorithm>
#include <array>
#include <string>
#include <string_view>

namespace rules {

inline bool is_space(char c) { return c == ' ' || (c >= '\t' && c <= '\r'); }
inline char lower(char c) { return c >= 'A' && c <= 'Z' ? char(c - 'A' + 'a') : c; }

inline std::string_view trim(std::string_view text) {
  while (!text.empty() && is_space(text.front())) text.remove_prefix(1);
  while (!text.empty() && is_space(text.back())) text.remove_suffix(1);
  return text;
}

// Whether `name` is in `list`, names with commas between.
inline bool listed(std::string_view list, std::string_view name) {
  while (true) {
    size_t comma = list.find(',');
    if (trim(list.substr(0, comma)) == name) return true;
    if (comma == list.npos) return false;
    list.remove_prefix(comma + 1);
  }
}

// Whether the text holds a command that destroys: spaces counted once, letters in any case, and backslashes left out,
// since JSON and shells both let them stand before letters that need none.
inline bool destroys(std::string_view text) {
  static constexpr std::array<std::string_view, 12> parts = {
      "rm -rf /", "rm -fr /", "rm -rf ~", "rm -rf *", "--no-preserve-root", "mkfs", "wipefs",
      "of=/dev/", "> /dev/sd", ":(){",     "drop database", "shred "};
  std::string plain;
  for (char c : text) {
    if (c == '\\') continue;
    if (!is_space(c)) plain += lower(c);
    else if (!plain.empty() && plain.back() != ' ') plain += ' ';
  }
  while (!plain.empty() && plain.back() == ' ') plain.pop_back();
  return std::ranges::any_of(parts, [&](std::string_view part) { return plain.contains(part); });
}

// Whether a short text orders what destroys. A long one may quote it, in a log or a file, and one that asks about it
// does no harm: both are left to the questions.
inline bool orders_destruction(std::string_view text) {
  static constexpr std::array<std::string_view, 6> asks = {"explain", "what", "why", "how", "describe", "tell me"};
  if (text.size() > 200 || !destroys(text)) return false;
  std::string start(trim(text));
  std::ranges::transform(start, start.begin(), lower);
  return std::ranges::none_of(asks, [&](std::string_view word) { return start.starts_with(word); });
}

// Whether a tool call's arguments, {"command": "…"} and nothing else, hold one command that only reads.
inline bool only_reads(std::string_view arguments) {
  static constexpr std::array<std::string_view, 10> reads = {"ls", "cat",  "pwd",  "head",   "tail",
                                                             "wc", "grep", "stat", "whoami", "git status"};
  arguments = trim(arguments);
  if (arguments.size() < 2 || arguments.front() != '{' || arguments.back() != '}') return false;
  std::string_view inside = arguments.substr(1, arguments.size() - 2);
  size_t colon = inside.find(':');
  if (colon == inside.npos) return false;
  std::string_view name = trim(inside.substr(0, colon)), command = trim(inside.substr(colon + 1));
  if (name != "\"command\"" && name != "\"cmd\"") return false;
  if (command.size() < 2 || command.front() != '"' || command.back() != '"') return false;
  command = command.substr(1, command.size() - 2);
  // A quote inside would end the string early; the other signs chain, redirect or substitute.
  if (command.find_first_of("\";|&><`$\n\\") != command.npos) return false;
  command = trim(command);
  return std::ranges::any_of(reads, [&](std::string_view known) {
    return command.starts_with(known) && (command.size() == known.size() || command[known.size()] == ' ');
  });
}

} // namespace rules

#endif
