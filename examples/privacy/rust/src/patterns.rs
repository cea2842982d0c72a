//! Personal data and secrets that are known by their form.

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Personal,
    Secret,
}

/// What tokens of well-known services start with, and how many characters they have at least.
const TOKENS: [(&str, usize); 9] = [
    ("AKIA", 20),
    ("ghp_", 36),
    ("gho_", 36),
    ("github_pat_", 40),
    ("glpat-", 26),
    ("sk-", 24),
    ("xoxb-", 24),
    ("xoxp-", 24),
    ("AIza", 39),
];

/// What a text holds, each by the name of its form.
pub(crate) fn find(text: &str) -> Vec<(Kind, &'static str)> {
    let mut found = Vec::new();
    if text.contains("-----BEGIN ") && text.contains("PRIVATE KEY-----") {
        found.push((Kind::Secret, "private-key"));
    }
    let outside = |c: char| !(c.is_alphanumeric() || "@.+_-%".contains(c));
    for word in text.split(outside).map(|word| word.trim_matches(['.', '-'])) {
        if TOKENS.iter().any(|(start, least)| word.starts_with(start) && word.len() >= *least) {
            found.push((Kind::Secret, "token"));
        } else if is_web_token(word) {
            found.push((Kind::Secret, "web-token"));
        } else if is_mail(word) {
            found.push((Kind::Personal, "mail"));
        }
    }
    for (at, _) in text.char_indices().filter(|(at, _)| starts_a_word(text, *at)) {
        let rest = &text[at..];
        if is_iban(rest) {
            found.push((Kind::Personal, "iban"));
        } else if is_card(rest) {
            found.push((Kind::Personal, "card"));
        } else if is_phone(rest) {
            found.push((Kind::Personal, "phone"));
        }
    }
    found
}

fn starts_a_word(text: &str, at: usize) -> bool {
    !text[..at].ends_with(|c: char| c.is_alphanumeric() || c == '+')
}

/// A JSON web token: three parts of base64, the first an object's.
fn is_web_token(word: &str) -> bool {
    let parts: Vec<&str> = word.split('.').collect();
    parts.len() == 3 && parts[0].starts_with("eyJ") && parts[1].starts_with("eyJ") && parts[2].len() >= 10
}

fn is_mail(word: &str) -> bool {
    let Some((name, host)) = word.rsplit_once('@') else { return false };
    let Some((domain, ending)) = host.rsplit_once('.') else { return false };
    let plain = |part: &str| part.chars().all(|c| c.is_alphanumeric() || c == '.' || c == '-');
    !name.is_empty()
        && !domain.is_empty()
        && plain(domain)
        && ending.len() >= 2
        && ending.chars().all(char::is_alphabetic)
}

/// Whether the text starts with an IBAN whose check digits are right (ISO 13616), in groups or not.
fn is_iban(text: &str) -> bool {
    let bytes = text.as_bytes();
    let head = |at: usize, of: fn(&u8) -> bool| bytes.get(at).is_some_and(of);
    if !(head(0, u8::is_ascii_uppercase) && head(1, u8::is_ascii_uppercase) && head(2, u8::is_ascii_digit)) {
        return false;
    }
    let mut joined = Vec::new();
    let mut rest = bytes.iter().peekable();
    while let Some(c) = rest.next() {
        match c {
            b'0'..=b'9' | b'A'..=b'Z' if joined.len() < 34 => joined.push(*c),
            b' ' => {}
            _ => return false,
        }
        // It may end where a group does; what follows can be text.
        let ends = rest.peek().is_none_or(|next| !next.is_ascii_alphanumeric());
        if ends && joined.len() >= 15 && remainder(&joined) == 1 {
            return true;
        }
    }
    false
}

/// Modulo 97, with the first four characters last and letters as two digits.
fn remainder(iban: &[u8]) -> u32 {
    iban[4..].iter().chain(&iban[..4]).fold(0, |sum, c| match c {
        b'0'..=b'9' => (sum * 10 + u32::from(c - b'0')) % 97,
        _ => (sum * 100 + u32::from(c - b'A') + 10) % 97,
    })
}

/// Whether the text starts with the number of a payment card, in groups or not: 13 to 19 digits of which the first is 2 to
/// 6 and the last checks the others (Luhn). It may end where a group does; what follows can be its expiry date.
fn is_card(text: &str) -> bool {
    let groups = groups(text, &[' ', '-']);
    let digits = groups.concat();
    let ends = groups.iter().scan(0, |end, group| {
        *end += group.len();
        Some(*end)
    });
    digits.first().is_some_and(|first| (2..=6).contains(first))
        && ends.filter(|end| (13..=19).contains(end)).any(|end| checks(&digits[..end]))
}

fn checks(digits: &[u32]) -> bool {
    let doubled = digits.iter().rev().enumerate().map(|(at, digit)| match (at % 2, digit * 2) {
        (0, _) => *digit,
        (_, twice) => twice / 10 + twice % 10,
    });
    doubled.sum::<u32>() % 10 == 0
}

/// Whether the text starts with a telephone number with its country's code.
fn is_phone(text: &str) -> bool {
    let separators = [' ', '-', '/', '(', ')', '.'];
    text.strip_prefix('+').is_some_and(|rest| (8..=15).contains(&groups(rest, &separators).concat().len()))
}

/// So many digits are looked at: one more than the longest number that counts has, since a text may be all digits.
const MOST_DIGITS: usize = 20;

/// The groups of digits that the text starts with; between two of them one or two of the separators stand.
fn groups(text: &str, separators: &[char]) -> Vec<Vec<u32>> {
    let (mut found, mut between, mut digits) = (vec![Vec::new()], 0, 0);
    for c in text.chars() {
        match c.to_digit(10) {
            Some(digit) => {
                if between > 0 {
                    found.push(Vec::new());
                }
                found.last_mut().expect("it starts with one").push(digit);
                between = 0;
                digits += 1;
                if digits == MOST_DIGITS {
                    break;
                }
            }
            None if separators.contains(&c) && !found[0].is_empty() && between < 2 => between += 1,
            None => break,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(text: &str) -> Vec<&'static str> {
        find(text).into_iter().map(|(_, name)| name).collect()
    }

    #[test]
    fn forms_are_found_where_they_stand() {
        for (text, name) in [
            ("write to jo.doe+x@mail.example.org.", "mail"),
            ("<jo@example.org>", "mail"),
            ("pay to DE89 3704 0044 0532 0130 00 today", "iban"),
            ("GB29NWBK60161331926819", "iban"),
            ("card 4111 1111 1111 1111, exp 12/30", "card"),
            ("4111-1111-1111-1111", "card"),
            ("on 2026-11-30: 5500 0000 0000 0004 12/30", "card"),
            ("call +49 (30) 901820", "phone"),
            ("-----BEGIN RSA PRIVATE KEY-----\nMIIE", "private-key"),
            ("key=AKIAIOSFODNN7EXAMPLE", "token"),
            ("{\"auth\":\"eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.c2lnbmF0dXJlLXg\"}", "web-token"),
        ] {
            assert_eq!(names(text), [name], "{text}");
        }
    }

    #[test]
    fn no_more_digits_are_looked_at_than_a_number_has() {
        assert_eq!(groups(&"1 ".repeat(50_000), &[' ']).len(), MOST_DIGITS);
        assert!(names(&"1 ".repeat(50_000)).is_empty());
    }

    #[test]
    fn what_only_looks_alike_is_left_alone() {
        for text in [
            "use @dataclass and a@b",
            "DE88 3704 0044 0532 0130 00",
            "4111 1111 1111 1112",
            "0000 0000 0000 0000",
            "1701301234564, 1701301234565",
            "1 + 49 = 50, +5 points",
            "the sk-learn package, sk-",
            "2026-11-30 12:00:00",
            "4111 1111 1111 1112 3456 7890",
            "411111111111111100000",
            "commit 1fb067316c0a3846564f0d749f569c90",
            "-----BEGIN PUBLIC KEY-----",
            "",
        ] {
            assert!(names(text).is_empty(), "{text}: {:?}", names(text));
        }
    }
}
