//! Differences of two values as text, for the refusals that show what may not change.

use serde_json::Value;

const CONTEXT: usize = 3;

#[derive(Clone, Copy, PartialEq, Eq)]
enum Line {
    Same,
    Removed,
    Added,
}

/// The unified difference of two values' indented JSON.
pub(super) fn unified(old: &Value, new: &Value) -> String {
    let (old, new) = (pretty(old), pretty(new));
    let (old, new): (Vec<&str>, Vec<&str>) = (old.lines().collect(), new.lines().collect());
    let script = script(&old, &new);
    let mut text = String::new();
    let mut index = 0;
    while let Some(first) = (index..script.len()).find(|i| script[*i].0 != Line::Same) {
        let start = first.saturating_sub(CONTEXT).max(index);
        let mut end = first;
        while let Some(next) =
            (end..script.len().min(end + 2 * CONTEXT + 1)).find(|i| script[*i].0 != Line::Same)
        {
            end = next + 1;
        }
        let end = (end + CONTEXT).min(script.len());
        text.push_str(&hunk(&script, start, end));
        index = end;
    }
    text
}

fn hunk(script: &[(Line, &str)], start: usize, end: usize) -> String {
    let count = |lines: &[(Line, &str)], not: Line| lines.iter().filter(|(kind, _)| *kind != not).count();
    let range = |not| {
        let before = count(&script[..start], not);
        match count(&script[start..end], not) {
            1 => format!("{}", before + 1),
            0 => format!("{before},0"),
            length => format!("{},{length}", before + 1),
        }
    };
    let mut text = format!("@@ -{} +{} @@\n", range(Line::Added), range(Line::Removed));
    for (kind, line) in &script[start..end] {
        text.push(match kind {
            Line::Same => ' ',
            Line::Removed => '-',
            Line::Added => '+',
        });
        text.push_str(line);
        text.push('\n');
    }
    text
}

/// The shortest way from one list of lines to the other.
fn script<'a>(old: &[&'a str], new: &[&'a str]) -> Vec<(Line, &'a str)> {
    let width = new.len() + 1;
    let mut common = vec![0_u32; (old.len() + 1) * width];
    for i in (0..old.len()).rev() {
        for j in (0..new.len()).rev() {
            common[i * width + j] = if old[i] == new[j] {
                common[(i + 1) * width + j + 1] + 1
            } else {
                common[(i + 1) * width + j].max(common[i * width + j + 1])
            };
        }
    }
    let (mut i, mut j) = (0, 0);
    let mut script = Vec::new();
    while i < old.len() || j < new.len() {
        if i < old.len() && j < new.len() && old[i] == new[j] {
            script.push((Line::Same, old[i]));
            (i, j) = (i + 1, j + 1);
        } else if j >= new.len()
            || (i < old.len() && common[(i + 1) * width + j] >= common[i * width + j + 1])
        {
            script.push((Line::Removed, old[i]));
            i += 1;
        } else {
            script.push((Line::Added, new[j]));
            j += 1;
        }
    }
    script
}

fn pretty(value: &Value) -> String {
    // A spec is small; one that is not would make a message nobody reads.
    const LIMIT: usize = 2000;
    let text = serde_json::to_string_pretty(value).unwrap_or_default().replace("  ", " ");
    text.lines().take(LIMIT).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn only_the_surroundings_of_changes_are_shown() {
        let old = json!({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5, "f": 6});
        let new = json!({"a": 1, "b": 2, "c": 3, "d": 4, "e": 7, "f": 6});
        assert_eq!(
            unified(&old, &new),
            "@@ -3,6 +3,6 @@\n  \"b\": 2,\n  \"c\": 3,\n  \"d\": 4,\n- \"e\": 5,\n+ \"e\": 7,\n  \"f\": 6\n }\n"
        );
        assert_eq!(unified(&old, &old), "");
    }
}
