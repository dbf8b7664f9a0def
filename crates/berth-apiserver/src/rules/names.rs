//! The syntax of names: DNS labels and subdomains, label keys and values, with the words Kubernetes uses to refuse them.
//!
//! Every check returns the list of complaints, empty when the value is fine, because a refusal repeats each of them as
//! a cause of its own.

const LABEL: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?";
const SUBDOMAIN: &str = "[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*";
const LABEL_MESSAGE: &str = "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character";
const SUBDOMAIN_MESSAGE: &str = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character";
const KEY: &str = "([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]";
const KEY_MESSAGE: &str = "must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
const VALUE: &str = "(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?";
const VALUE_MESSAGE: &str = "a valid label must be an empty string or consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character";
const CONFIG_KEY: &str = "[-._a-zA-Z0-9]+";
const CONFIG_KEY_MESSAGE: &str =
    "a valid config key must consist of alphanumeric characters, '-', '_' or '.'";

/// Which names objects of a kind may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameRule {
    /// A DNS subdomain of at most 253 characters: most kinds.
    Subdomain,
    /// A DNS label of at most 63 characters: namespaces.
    Label,
    /// Anything that can stand as one segment of a URL path: RBAC kinds.
    PathSegment,
    /// `<plural>.<group>` is checked by the kind itself; the syntax is a DNS subdomain.
    Definition,
}

impl NameRule {
    /// What is wrong with `name`; `prefix` if more characters will be appended to it (`generateName`).
    pub(crate) fn complaints(self, name: &str, prefix: bool) -> Vec<String> {
        // A trailing dash is fine where random characters follow it.
        let masked = match name.strip_suffix('-') {
            Some(head) if prefix && !head.is_empty() => format!("{head}a"),
            _ => name.to_owned(),
        };
        match self {
            Self::Subdomain | Self::Definition => subdomain(&masked),
            Self::Label => label(&masked),
            Self::PathSegment => path_segment(name, prefix),
        }
    }
}

/// "must be no more than N characters".
pub(crate) fn too_long(limit: usize) -> String {
    format!("must be no more than {limit} characters")
}

/// "must be between LOW and HIGH, inclusive".
pub(crate) fn in_range(low: i64, high: i64) -> String {
    format!("must be between {low} and {high}, inclusive")
}

/// A complaint that ends with examples and the expression that was used.
pub(crate) fn expression(message: &str, expression: &str, examples: &[&str]) -> String {
    if examples.is_empty() {
        return format!("{message} (regex used for validation is '{expression}')");
    }
    let examples = examples.iter().map(|e| format!("'{e}', ")).collect::<Vec<_>>().join(" or ");
    format!("{message} (e.g. {examples}regex used for validation is '{expression}')")
}

/// Checks an RFC 1123 label.
pub(crate) fn label(value: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    if value.len() > 63 {
        complaints.push(too_long(63));
    }
    if !is_label(value) {
        if is_subdomain(value) {
            complaints.push("must not contain dots".to_owned());
        } else {
            complaints.push(expression(LABEL_MESSAGE, LABEL, &["my-name", "123-abc"]));
        }
    }
    complaints
}

/// Checks an RFC 1123 subdomain.
pub(crate) fn subdomain(value: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    if value.len() > 253 {
        complaints.push(too_long(253));
    }
    if !is_subdomain(value) {
        complaints.push(expression(SUBDOMAIN_MESSAGE, SUBDOMAIN, &["example.com"]));
    }
    complaints
}

/// Checks a label key, which is also what Kubernetes calls a qualified name.
pub(crate) fn qualified(value: &str) -> Vec<String> {
    let examples = &["MyName", "my.name", "123-abc"];
    let mut complaints = Vec::new();
    let parts: Vec<&str> = value.split('/').collect();
    let name = match parts.as_slice() {
        [name] => *name,
        [prefix, name] => {
            if prefix.is_empty() {
                complaints.push("prefix part must be non-empty".to_owned());
            } else {
                complaints.extend(subdomain(prefix).into_iter().map(|c| format!("prefix part {c}")));
            }
            *name
        }
        _ => {
            let message = expression(KEY_MESSAGE, KEY, examples);
            return vec![format!(
                "a valid label key {message} with an optional DNS subdomain prefix and '/' (e.g. 'example.com/MyName')"
            )];
        }
    };
    if name.is_empty() {
        complaints.push("name part must be non-empty".to_owned());
    } else if name.len() > 63 {
        complaints.push("name part must be no more than 63 bytes".to_owned());
    }
    if !is_key(name) {
        complaints.push(format!("name part {}", expression(KEY_MESSAGE, KEY, examples)));
    }
    complaints
}

/// Checks a label value.
pub(crate) fn label_value(value: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    if value.len() > 63 {
        complaints.push("must be no more than 63 bytes".to_owned());
    }
    if !value.is_empty() && !is_key(value) {
        complaints.push(expression(VALUE_MESSAGE, VALUE, &["MyValue", "my_value", "12345"]));
    }
    complaints
}

/// Checks a key of a ConfigMap or Secret.
pub(crate) fn config_key(value: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    if value.len() > 253 {
        complaints.push(too_long(253));
    }
    if value.is_empty() || !value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b)) {
        complaints.push(expression(CONFIG_KEY_MESSAGE, CONFIG_KEY, &["key.name", "KEY_NAME", "key-name"]));
    }
    match value {
        "." => complaints.push("must not be '.'".to_owned()),
        ".." => complaints.push("must not be '..'".to_owned()),
        _ if value.starts_with("..") => complaints.push("must not start with '..'".to_owned()),
        _ => {}
    }
    complaints
}

/// Checks the name of an environment variable, by the relaxed rule that is in force today.
pub(crate) fn variable(value: &str) -> Vec<String> {
    let printable = |c: char| (' '..='~').contains(&c) && c != '=';
    if value.is_empty() {
        vec!["environment variable name must be non-empty".to_owned()]
    } else if value.chars().all(printable) {
        Vec::new()
    } else {
        vec!["a valid environment variable name must consist only of printable ASCII characters other than '='".to_owned()]
    }
}

/// Checks the name of a container port.
pub(crate) fn port(value: &str) -> Vec<String> {
    let mut complaints = Vec::new();
    if value.len() > 15 {
        complaints.push(too_long(15));
    }
    if value.is_empty() || !value.bytes().all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-') {
        complaints.push("must contain only alpha-numeric characters (a-z, 0-9), and hyphens (-)".to_owned());
    }
    if !value.bytes().any(|b| b.is_ascii_lowercase()) {
        complaints.push("must contain at least one letter (a-z)".to_owned());
    }
    if value.contains("--") {
        complaints.push("must not contain consecutive hyphens".to_owned());
    }
    if value.starts_with('-') || value.ends_with('-') {
        complaints.push("must not begin or end with a hyphen".to_owned());
    }
    complaints
}

fn path_segment(name: &str, prefix: bool) -> Vec<String> {
    if !prefix && (name == "." || name == "..") {
        return vec![format!("may not be '{name}'")];
    }
    ["/", "%"].iter().filter(|c| name.contains(**c)).map(|c| format!("may not contain '{c}'")).collect()
}

fn is_label(value: &str) -> bool {
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit();
    match (value.bytes().next(), value.bytes().next_back()) {
        (Some(first), Some(last)) => {
            plain(first) && plain(last) && value.bytes().all(|b| plain(b) || b == b'-')
        }
        _ => false,
    }
}

fn is_subdomain(value: &str) -> bool {
    value.split('.').all(is_label)
}

fn is_key(value: &str) -> bool {
    match (value.bytes().next(), value.bytes().next_back()) {
        (Some(first), Some(last)) => {
            first.is_ascii_alphanumeric()
                && last.is_ascii_alphanumeric()
                && value.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_kubernetes_takes_are_taken() {
        for name in ["a", "a-b", "0", "a.b-c.d", "x".repeat(253).as_str()] {
            assert_eq!(NameRule::Subdomain.complaints(name, false), Vec::<String>::new(), "{name}");
        }
        assert!(NameRule::Subdomain.complaints("data-", true).is_empty());
        assert!(NameRule::PathSegment.complaints("system:node", false).is_empty());
        assert!(qualified("example.com/My_Name").is_empty());
        assert!(label_value("").is_empty());
        assert!(config_key("tls.crt").is_empty());
        assert!(variable("a b").is_empty());
    }

    #[test]
    fn names_that_kubernetes_refuses_are_refused_in_its_words() {
        let subdomain = "a lowercase RFC 1123 subdomain must consist of lower case alphanumeric characters, '-' or '.', and must start and end with an alphanumeric character (e.g. 'example.com', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?(\\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*')";
        for name in ["", "A", "-a", "a-", "a..b", "a_b", "ä"] {
            assert_eq!(NameRule::Subdomain.complaints(name, false), [subdomain], "{name}");
        }
        assert_eq!(NameRule::Subdomain.complaints(&"x".repeat(254), false), [too_long(253)]);
        assert_eq!(NameRule::Label.complaints("a.b", false), ["must not contain dots"]);
        assert_eq!(
            NameRule::PathSegment.complaints("a/b%", false),
            ["may not contain '/'", "may not contain '%'"]
        );
        assert_eq!(NameRule::PathSegment.complaints("..", false), ["may not be '..'"]);
        assert_eq!(
            label("A"),
            [
                "a lowercase RFC 1123 label must consist of lower case alphanumeric characters or '-', and must start and end with an alphanumeric character (e.g. 'my-name',  or '123-abc', regex used for validation is '[a-z0-9]([-a-z0-9]*[a-z0-9])?')"
            ]
        );
    }

    #[test]
    fn qualified_names_are_refused_part_by_part() {
        let name = "name part must consist of alphanumeric characters, '-', '_' or '.', and must start and end with an alphanumeric character (e.g. 'MyName',  or 'my.name',  or '123-abc', regex used for validation is '([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9]')";
        assert_eq!(qualified("_a"), [name]);
        assert_eq!(qualified(""), ["name part must be non-empty", name]);
        assert_eq!(qualified("/a"), ["prefix part must be non-empty"]);
        assert!(qualified("a/b/c")[0].starts_with("a valid label key must consist of"));
        assert_eq!(qualified(&"x".repeat(64)), ["name part must be no more than 63 bytes"]);
    }
}
