//! `cargo xtask unsafe`: every piece of unsafe code in the workspace and the invariant it rests on, and a failure if one names
//! none. Clippy looks at blocks and impls as well, but not into macros.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use proc_macro2::{TokenStream, TokenTree};
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// One piece of unsafe code.
#[derive(Debug, PartialEq, Eq)]
struct Site {
    line: usize,
    what: What,
    /// `None` if none is named.
    invariant: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Block,
    Impl,
    /// A function or trait: its documentation says what its caller or implementor promises.
    Contract,
    /// A method whose trait has that documentation.
    Method,
}

/// Prints what there is; only counts if `brief`.
pub(crate) fn run(root: &Path, brief: bool) -> Result<ExitCode, String> {
    let mut counts = BTreeMap::<String, [usize; 4]>::new();
    let mut undocumented = 0;
    for file in sources(root)? {
        let shown = file.strip_prefix(root).unwrap_or(&file).display().to_string();
        let text = fs::read_to_string(&file).map_err(|error| format!("cannot read {shown}: {error}"))?;
        let name = shown.split('/').next().unwrap_or_default().to_owned();
        let counts = counts.entry(name).or_default();
        for site in sites(&text).map_err(|error| format!("cannot parse {shown}: {error}"))? {
            counts[site.what as usize] += 1;
            let what = match site.what {
                What::Block => "block",
                What::Impl => "impl",
                What::Contract => "contract",
                What::Method => "method",
            };
            if site.invariant.is_none() {
                undocumented += 1;
            }
            if !brief || site.invariant.is_none() {
                let invariant = site.invariant.as_deref().unwrap_or("NO INVARIANT");
                println!("{shown}:{}: {what}: {invariant}", site.line);
            }
        }
    }
    for (name, [blocks, impls, contracts, methods]) in &counts {
        println!(
            "note: unsafe in {name}: {blocks} blocks, {impls} impls, {contracts} functions and traits, {methods} trait methods"
        );
    }
    if undocumented > 0 {
        println!("{undocumented} pieces of unsafe code do not say what they rest on: add a `// SAFETY:` or a `# Safety` section");
    }
    Ok(if undocumented == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// All Rust files of the workspace's packages, in order.
fn sources(root: &Path) -> Result<Vec<PathBuf>, String> {
    let is_package = |path: &PathBuf| path.join("Cargo.toml").is_file();
    let mut left: Vec<_> = entries(root)?.into_iter().filter(is_package).collect();
    let mut files = Vec::new();
    while let Some(path) = left.pop() {
        if path.is_dir() {
            if !path.ends_with("target") {
                left.extend(entries(&path)?);
            }
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            files.push(path);
        }
    }
    files.sort();
    Ok(files)
}

fn entries(path: &Path) -> Result<Vec<PathBuf>, String> {
    let read = |path: &Path| fs::read_dir(path)?.map(|entry| entry.map(|entry| entry.path())).collect::<Result<Vec<_>, _>>();
    read(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// The unsafe code of a file.
fn sites(text: &str) -> Result<Vec<Site>, syn::Error> {
    let mut finder = Finder { lines: text.lines().collect(), sites: Vec::new() };
    finder.visit_file(&syn::parse_file(text)?);
    finder.sites.sort_by_key(|site| site.line);
    Ok(finder.sites)
}

struct Finder<'a> {
    lines: Vec<&'a str>,
    sites: Vec<Site>,
}

impl Finder<'_> {
    fn add(&mut self, token: &impl Spanned, what: What) {
        let line = token.span().start().line;
        let invariant = match what {
            What::Block | What::Impl => self.comment(line, "SAFETY:"),
            What::Contract => self.comment(line, "# Safety"),
            What::Method => Some("its trait's contract".into()),
        };
        self.sites.push(Site { line, what, invariant });
    }

    /// What the comment that begins with `mark` says, in the line itself or above: past the beginning of the statement that
    /// the line belongs to, and past attributes, but not past what ends another statement.
    fn comment(&self, line: usize, mark: &str) -> Option<String> {
        let body = |line: &str| {
            let (_, comment) = line.split_once("//")?;
            Some(comment.trim_start_matches(['/', '!']).trim().to_owned())
        };
        let mut first = line - 1;
        while !body(self.lines[first]).is_some_and(|comment| comment.starts_with(mark)) {
            first = first.checked_sub(1)?;
            let code = self.lines[first].trim();
            let is_comment = code.starts_with("//");
            if !is_comment && (code.is_empty() || code.ends_with([';', '}'])) {
                return None;
            }
        }
        let text = self.lines[first..].iter().enumerate();
        let text = text.take_while(|(n, line)| *n == 0 || line.trim_start().starts_with("//"));
        let text: Vec<_> = text.filter_map(|(_, line)| body(line)).collect();
        Some(text.join(" ").trim_start_matches(mark).trim().to_owned())
    }

    /// Macros are not parsed: an `unsafe` in one is a block unless it is followed by something else.
    fn tokens(&mut self, tokens: TokenStream) {
        let mut tokens = tokens.into_iter().peekable();
        while let Some(token) = tokens.next() {
            match &token {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(ident) if ident == "unsafe" => match tokens.peek() {
                    Some(TokenTree::Group(_)) => self.add(&token, What::Block),
                    Some(TokenTree::Ident(next)) if next == "impl" => self.add(&token, What::Impl),
                    _ => self.add(&token, What::Contract),
                },
                _ => {}
            }
        }
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_expr_unsafe(&mut self, node: &'ast syn::ExprUnsafe) {
        self.add(&node.unsafe_token, What::Block);
        visit::visit_expr_unsafe(self, node);
    }

    fn visit_item_impl(&mut self, node: &'ast syn::ItemImpl) {
        if let Some(token) = &node.unsafety {
            self.add(token, What::Impl);
        }
        for item in &node.items {
            if let syn::ImplItem::Fn(method) = item
                && let Some(token) = &method.sig.unsafety
            {
                self.add(token, if node.trait_.is_some() { What::Method } else { What::Contract });
            }
        }
        visit::visit_item_impl(self, node);
    }

    fn visit_item_fn(&mut self, node: &'ast syn::ItemFn) {
        if let Some(token) = &node.sig.unsafety {
            self.add(token, What::Contract);
        }
        visit::visit_item_fn(self, node);
    }

    fn visit_item_trait(&mut self, node: &'ast syn::ItemTrait) {
        if let Some(token) = &node.unsafety {
            self.add(token, What::Contract);
        }
        visit::visit_item_trait(self, node);
    }

    fn visit_trait_item_fn(&mut self, node: &'ast syn::TraitItemFn) {
        if let Some(token) = &node.sig.unsafety {
            self.add(token, What::Contract);
        }
        visit::visit_trait_item_fn(self, node);
    }

    fn visit_item_foreign_mod(&mut self, node: &'ast syn::ItemForeignMod) {
        self.add(&node.abi, What::Impl);
        visit::visit_item_foreign_mod(self, node);
    }

    fn visit_macro(&mut self, node: &'ast syn::Macro) {
        self.tokens(node.tokens.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(usize, What, Option<String>)> {
        let sites = sites(text).expect("Rust");
        sites.into_iter().map(|site| (site.line, site.what, site.invariant)).collect()
    }

    #[test]
    fn documented_code_is_found_with_what_it_rests_on() {
        let text = "/// Does.\n///\n/// # Safety\n///\n/// p is valid.\n#[inline]\npub unsafe fn f(p: *const u8) -> u8 {\n    \
                    // SAFETY: the caller's\n    // contract.\n    let x = g(\n        unsafe { *p },\n    );\n    x\n}\n\
                    // SAFETY: no data.\nunsafe impl Send for T {}\nimpl U for T {\n    unsafe fn m() {}\n}\n\
                    m! {\n    // SAFETY: in a macro.\n    x => unsafe { y() };\n}\n";
        let expected = [
            (7, What::Contract, "p is valid."),
            (11, What::Block, "the caller's contract."),
            (16, What::Impl, "no data."),
            (18, What::Method, "its trait's contract"),
            (22, What::Block, "in a macro."),
        ];
        assert_eq!(found(text), expected.map(|(line, what, why)| (line, what, Some(why.to_owned()))));
    }

    #[test]
    fn undocumented_code_is_found_out() {
        let text = "fn f() {\n    // SAFETY: of the first.\n    unsafe { a() };\n    unsafe { b() };\n}\nunsafe impl Send for T {}\n\
                    pub unsafe fn g() {}\nm! { unsafe { c() } }\nunsafe trait V {}\n";
        let lines = found(text).into_iter().filter(|(_, _, why)| why.is_none()).map(|(line, ..)| line);
        assert_eq!(lines.collect::<Vec<_>>(), [4, 6, 7, 8, 9]);
    }

    #[test]
    fn the_protocol_has_none() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("a workspace");
        for file in sources(root).expect("readable").iter().filter(|file| file.starts_with(root.join("protocol"))) {
            assert_eq!(found(&fs::read_to_string(file).expect("readable")), [], "{}", file.display());
        }
    }
}
