//! The tables in this repository's Markdown files that commands read: what stands there is checked, so it does not go stale.

use std::fs;
use std::path::Path;

/// The cells of each row of the tables under the heading `## heading` of a file, without the tables' own headings. Cells lose
/// their backquotes.
pub(crate) fn rows(file: &Path, heading: &str) -> Result<Vec<Vec<String>>, String> {
    let text = fs::read_to_string(file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let rows = parse(&text, heading);
    if rows.is_empty() { Err(format!("{}: no table under \"## {heading}\"", file.display())) } else { Ok(rows) }
}

fn parse(text: &str, heading: &str) -> Vec<Vec<String>> {
    let section = text.lines().skip_while(|line| line.strip_prefix("## ") != Some(heading)).skip(1);
    let section = section.take_while(|line| !line.starts_with("## "));
    let mut rows = Vec::new();
    for line in section {
        let Some(cells) = line.strip_prefix('|').and_then(|line| line.trim_end().strip_suffix('|')) else { continue };
        if cells.starts_with("--") || cells.starts_with(" --") {
            // What stands above this line is the heading.
            rows.pop();
            continue;
        }
        rows.push(cells.split(" | ").map(|cell| cell.replace('`', "").trim().to_owned()).collect());
    }
    rows
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_read_and_headings_are_not() {
        let text = "# T\n## A\n| x | y |\n|---|---|\n| `1` | a b |\n| 2 | `c`, `d` |\n\ntext\n\n## B\n| z |\n| --- |\n| 3 |\n";
        assert_eq!(parse(text, "A"), [["1", "a b"], ["2", "c, d"]]);
        assert_eq!(parse(text, "B"), [["3"]]);
        assert!(parse(text, "C").is_empty());
    }
}
