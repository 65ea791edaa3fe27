//! That the tables which name tests name those that there are.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::table;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace").to_path_buf()
}

fn rows(file: &str, heading: &str) -> Vec<Vec<String>> {
    table::rows(&root().join(file), heading).unwrap_or_else(|error| panic!("{error}"))
}

/// Every row of the map of faults has a test, and all its tests exist and are named after a row or stand for one.
#[test]
fn every_row_of_known_faults_has_tests_that_exist() {
    let rows = rows("tests/README.md", "Rows");
    let numbers: Vec<_> = rows.iter().map(|row| row[0].parse().unwrap_or(0)).collect();
    assert_eq!(numbers, (1..=37).collect::<Vec<i32>>());
    for row in &rows {
        let [number, fault, tests, seen] = row.as_slice() else { panic!("not four cells: {row:?}") };
        assert!(!fault.is_empty() && !seen.is_empty() && !tests.is_empty(), "row {number}");
        for test in tests.split(", ") {
            let (file, name) = test.split_once("::").unwrap_or_else(|| panic!("row {number}: {test}"));
            let text = fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("row {number}: {file}: {error}"));
            let exists = ["(", "<"].iter().any(|end| text.contains(&format!("fn {name}{end}")));
            assert!(exists, "row {number}: {file} has no test {name}");
        }
        let named = format!("row_{number:0>2}");
        assert!(tests.contains(&named), "row {number}: no test is called {named}");
    }
}

/// The list of models is that of the models.
#[test]
fn every_model_is_listed() {
    let listed: BTreeSet<_> = rows("loom-tests/README.md", "Models").into_iter().map(|row| row[0].clone()).collect();
    let mut there = BTreeSet::new();
    for file in fs::read_dir(root().join("loom-tests/tests")).expect("models").flatten() {
        let text = fs::read_to_string(file.path()).expect("readable");
        let file = file.path().file_stem().expect("a name").display().to_string();
        let mut lines = text.lines().map(str::trim);
        while lines.by_ref().any(|line| line == "#[test]") {
            let name = lines.by_ref().find_map(|line| line.strip_prefix("fn ")?.split_once('(')).expect("a test is a function").0;
            there.insert(format!("{file}::{name}"));
        }
    }
    assert!(!there.is_empty());
    assert_eq!(listed.symmetric_difference(&there).collect::<Vec<_>>(), Vec::<&String>::new());
}
