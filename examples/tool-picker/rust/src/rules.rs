//! What settles a tool without a question.

use forkpoint_policy::Request;

/// Whether the conversation has called the tool: the model may call it again, and its calls stand there to be read.
pub(crate) fn called(request: &Request, name: &str) -> bool {
    request.messages.iter().flat_map(|turn| &turn.tool_calls).any(|call| call.name == name)
}

/// Whether the text names the tool, as a word of its own, in any case, with blanks for the name's joints.
pub(crate) fn names(text: &str, name: &str) -> bool {
    let words = |text: &str| -> Vec<String> {
        let parts = text.split(|c: char| !c.is_alphanumeric());
        parts.filter(|part| !part.is_empty()).map(str::to_lowercase).collect()
    };
    let (text, name) = (words(text), words(name));
    !name.is_empty() && text.windows(name.len()).any(|part| part == name)
}

/// The text on one line, cut to so many bytes between two characters.
pub(crate) fn opening(text: &str, most: usize) -> String {
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    let end = (0..=most.min(line.len())).rev().find(|&at| line.is_char_boundary(at)).unwrap_or(0);
    line[..end].trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tool_is_named_by_its_words() {
        assert!(names("Please use read_file on a.txt", "read_file"));
        assert!(names("use the Read File tool", "read-file"));
        assert!(!names("read the profile", "file"));
        assert!(!names("anything", "--"));
    }

    #[test]
    fn an_opening_is_cut_between_characters() {
        assert_eq!(opening(" Reads\n a  file. ", 160), "Reads a file.");
        assert_eq!(opening("aé", 2), "a");
        assert_eq!(opening("ab cd", 3), "ab");
        assert_eq!(opening("", 5), "");
    }
}
