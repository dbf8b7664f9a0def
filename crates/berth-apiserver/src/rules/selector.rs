//! Label and field selectors: the language of `labelSelector` and `fieldSelector`, and selectors inside objects.

use std::collections::BTreeSet;

use serde_json::Value;

use super::field::{Path, quote};
use super::read::{items, text};
use super::{names, read};
use crate::resource::Cause;

/// Whether a label must, or must not, have one of some values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    In,
    NotIn,
    Exists,
    DoesNotExist,
    Greater,
    Less,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Requirement {
    key: String,
    operator: Operator,
    values: BTreeSet<String>,
}

/// What labels an object must have; the empty one selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelSelector(Vec<Requirement>);

impl LabelSelector {
    /// Whether it selects everything.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether an object with these `metadata.labels` is selected.
    pub fn matches(&self, labels: &Value) -> bool {
        self.0
            .iter()
            .all(|requirement| requirement.matches(labels.get(&requirement.key).and_then(Value::as_str)))
    }

    /// The selector inside an object: `matchLabels` and `matchExpressions`.
    pub fn from_value(selector: &Value) -> Result<Self, String> {
        let mut requirements = Vec::new();
        for (key, value) in read::entries(selector, &["matchLabels"]) {
            let values = BTreeSet::from([value.as_str().unwrap_or_default().to_owned()]);
            requirements.push(Requirement { key: key.to_owned(), operator: Operator::In, values });
        }
        for expression in items(selector, &["matchExpressions"]) {
            let operator = match text(expression, &["operator"]) {
                "In" => Operator::In,
                "NotIn" => Operator::NotIn,
                "Exists" => Operator::Exists,
                "DoesNotExist" => Operator::DoesNotExist,
                other => return Err(format!("{} is not a valid label selector operator", quote(other))),
            };
            let values =
                items(expression, &["values"]).iter().filter_map(Value::as_str).map(str::to_owned).collect();
            requirements.push(Requirement { key: text(expression, &["key"]).to_owned(), operator, values });
        }
        Ok(Self(requirements))
    }
}

impl Requirement {
    fn matches(&self, value: Option<&str>) -> bool {
        match self.operator {
            Operator::In => value.is_some_and(|v| self.values.contains(v)),
            Operator::NotIn => value.is_none_or(|v| !self.values.contains(v)),
            Operator::Exists => value.is_some(),
            Operator::DoesNotExist => value.is_none(),
            Operator::Greater | Operator::Less => {
                let limit = self.values.first().and_then(|v| v.parse::<i64>().ok());
                match (value.and_then(|v| v.parse::<i64>().ok()), limit) {
                    (Some(value), Some(limit)) => {
                        if self.operator == Operator::Greater {
                            value > limit
                        } else {
                            value < limit
                        }
                    }
                    _ => false,
                }
            }
        }
    }

    fn checked(self) -> Result<Self, String> {
        let mut complaints = Vec::new();
        if matches!(self.operator, Operator::Greater | Operator::Less) {
            complaints.extend(self.values.iter().enumerate().filter(|(_, v)| v.parse::<i64>().is_err()).map(
                |(i, v)| {
                    let detail = "for 'Gt', 'Lt' operators, the value must be an integer";
                    Path::new("values").index(i).invalid(v.as_str(), detail).to_string()
                },
            ));
        }
        for (index, value) in self.values.iter().enumerate() {
            let errors = names::label_value(value);
            if !errors.is_empty() {
                let path = Path::new("values").index(index).key(&self.key);
                complaints.push(path.invalid(value.as_str(), errors.join("; ")).to_string());
            }
        }
        match complaints.as_slice() {
            [] => Ok(self),
            [one] => Err(one.clone()),
            many => Err(format!("[{}]", many.join(", "))),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Token {
    Word(String),
    Symbol(&'static str),
    Bad(String),
    End,
}

impl Token {
    fn shown(&self) -> String {
        match self {
            Self::Word(text) => text.clone(),
            Self::Symbol(text) => (*text).to_owned(),
            Self::Bad(text) => format!("error expected: keyword found '{text}'"),
            Self::End => String::new(),
        }
    }
}

/// Reads a label selector: `app=web,tier in (a,b),!legacy`.
pub fn parse_label_selector(selector: &str) -> Result<LabelSelector, String> {
    let mut parser = Parser { tokens: tokens(selector), position: 0 };
    let mut requirements = Vec::new();
    loop {
        match parser.peek() {
            Token::Word(_) | Token::Symbol("!") => {
                let requirement =
                    parser.requirement().map_err(|e| format!("unable to parse requirement: {e}"))?;
                requirements.push(requirement);
                match parser.next() {
                    Token::End => break,
                    Token::Symbol(",") => {
                        let after = parser.peek();
                        if !matches!(after, Token::Word(_) | Token::Symbol("!")) {
                            return Err(format!("found '{}', expected: identifier after ','", after.shown()));
                        }
                    }
                    other => {
                        return Err(format!("found '{}', expected: ',' or 'end of string'", other.shown()));
                    }
                }
            }
            Token::End => break,
            other => {
                let found = other.shown();
                return Err(format!("found '{found}', expected: !, identifier, or 'end of string'"));
            }
        }
    }
    Ok(LabelSelector(requirements))
}

struct Parser {
    tokens: Vec<Token>,
    position: usize,
}

impl Parser {
    fn peek(&self) -> Token {
        self.tokens.get(self.position).cloned().unwrap_or(Token::End)
    }

    fn next(&mut self) -> Token {
        let token = self.peek();
        self.position += 1;
        token
    }

    fn requirement(&mut self) -> Result<Requirement, String> {
        let mut token = self.next();
        let absent = token == Token::Symbol("!");
        if absent {
            token = self.next();
        }
        let Token::Word(key) = token else {
            return Err(format!("found '{}', expected: identifier", token.shown()));
        };
        let complaints = names::qualified(&key);
        if !complaints.is_empty() {
            return Err(Path::new("<nil>").invalid(key, complaints.join("; ")).to_string());
        }
        let ends = matches!(self.peek(), Token::End | Token::Symbol(","));
        if absent || ends {
            let operator = if absent { Operator::DoesNotExist } else { Operator::Exists };
            return Requirement { key, operator, values: BTreeSet::new() }.checked();
        }
        let operator = match self.next() {
            Token::Word(word) if word == "in" => Operator::In,
            Token::Word(word) if word == "notin" => Operator::NotIn,
            Token::Symbol("=" | "==") => return self.exact(key, Operator::In),
            Token::Symbol("!=") => return self.exact(key, Operator::NotIn),
            Token::Symbol(">") => return self.exact(key, Operator::Greater),
            Token::Symbol("<") => return self.exact(key, Operator::Less),
            other => {
                return Err(format!("found '{}', expected: in, notin, =, ==, !=, gt, lt", other.shown()));
            }
        };
        let values = self.values()?;
        Requirement { key, operator, values }.checked()
    }

    fn exact(&mut self, key: String, operator: Operator) -> Result<Requirement, String> {
        let value = match self.peek() {
            Token::End | Token::Symbol(",") => String::new(),
            Token::Word(word) => {
                self.position += 1;
                word
            }
            other => return Err(format!("found '{}', expected: identifier", other.shown())),
        };
        Requirement { key, operator, values: BTreeSet::from([value]) }.checked()
    }

    fn values(&mut self) -> Result<BTreeSet<String>, String> {
        let open = self.next();
        if open != Token::Symbol("(") {
            return Err(format!("found '{}' expected: '('", open.shown()));
        }
        let first = self.peek();
        match first {
            Token::Symbol(")") => {
                self.position += 1;
                Ok(BTreeSet::from([String::new()]))
            }
            Token::Word(_) | Token::Symbol(",") => {
                let values = self.list()?;
                if self.next() == Token::Symbol(")") {
                    Ok(values)
                } else {
                    Err(format!("found '{}', expected: ')'", first.shown()))
                }
            }
            other => Err(format!("found '{}', expected: ',', ')' or identifier", other.shown())),
        }
    }

    fn list(&mut self) -> Result<BTreeSet<String>, String> {
        let mut values = BTreeSet::new();
        loop {
            match self.next() {
                Token::Word(word) => {
                    values.insert(word);
                    match self.peek() {
                        Token::Symbol(",") => {}
                        Token::Symbol(")") => return Ok(values),
                        other => return Err(format!("found '{}', expected: ',' or ')'", other.shown())),
                    }
                }
                Token::Symbol(",") => {
                    if values.is_empty() || matches!(self.peek(), Token::Symbol(")" | ",")) {
                        values.insert(String::new());
                    }
                    if self.peek() == Token::Symbol(")") {
                        return Ok(values);
                    }
                }
                other => return Err(format!("found '{}', expected: ',', or identifier", other.shown())),
            }
        }
    }
}

fn tokens(selector: &str) -> Vec<Token> {
    const SYMBOLS: [&str; 9] = ["==", "!=", "=", "!", ">", "<", "(", ")", ","];
    let special = |c: char| "=!(),><".contains(c);
    let space = |c: char| " \t\r\n".contains(c);
    let mut tokens = Vec::new();
    let mut rest = selector;
    loop {
        rest = rest.trim_start_matches(space);
        if rest.is_empty() {
            return tokens;
        }
        if let Some(symbol) = SYMBOLS.iter().find(|s| rest.starts_with(**s)) {
            tokens.push(Token::Symbol(symbol));
            rest = &rest[symbol.len()..];
            continue;
        }
        let end = rest.find(|c| special(c) || space(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        // NUL ends the text for Kubernetes' lexer; here it is just no word.
        tokens.push(if word.contains('\0') {
            Token::Bad(word.to_owned())
        } else {
            Token::Word(word.to_owned())
        });
        rest = after;
    }
}

/// What fields an object must have; the empty one selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FieldSelector(Vec<(String, bool, String)>);

impl FieldSelector {
    /// Whether it selects everything.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The fields it speaks of, to be checked against what the kind supports.
    pub fn fields(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|(field, _, _)| field.as_str())
    }

    /// The value a field must have, if it names just one.
    pub fn exact(&self, field: &str) -> Option<&str> {
        self.0.iter().find(|(f, equal, _)| f == field && *equal).map(|(_, _, value)| value.as_str())
    }

    /// Whether an object with these fields is selected; a field it does not have counts as empty.
    pub fn matches(&self, fields: &[(&str, String)]) -> bool {
        self.0.iter().all(|(field, equal, value)| {
            let has = fields.iter().find(|(name, _)| name == field).map_or("", |(_, value)| value.as_str());
            (has == value) == *equal
        })
    }
}

/// Reads a field selector: `metadata.name=x,status.phase!=Running`.
pub fn parse_field_selector(selector: &str) -> Result<FieldSelector, String> {
    let mut terms = Vec::new();
    let mut parts = split_terms(selector);
    parts.sort_unstable();
    for term in parts {
        if term.is_empty() {
            continue;
        }
        let operator = |at: &usize| term[*at..].starts_with('=') || term[*at..].starts_with("!=");
        let Some(at) = term.char_indices().map(|(at, _)| at).find(operator) else {
            return Err(format!("invalid selector: '{selector}'; can't understand '{term}'"));
        };
        let (field, rest) = term.split_at(at);
        let (equal, value) = if let Some(value) = rest.strip_prefix("!=") {
            (false, value)
        } else {
            (true, rest.strip_prefix("==").unwrap_or(&rest[1..]))
        };
        let value = unescape(value)?;
        // A term that says nothing selects everything.
        if !field.is_empty() || !value.is_empty() {
            terms.push((field.to_owned(), equal, value));
        }
    }
    Ok(FieldSelector(terms))
}

fn split_terms(selector: &str) -> Vec<&str> {
    let mut terms = Vec::new();
    let mut start = 0;
    let mut escaped = false;
    for (index, c) in selector.char_indices() {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            ',' => {
                terms.push(&selector[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    terms.push(&selector[start..]);
    terms
}

fn unescape(value: &str) -> Result<String, String> {
    let mut plain = String::with_capacity(value.len());
    let mut chars = value.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some(c @ ('\\' | ',' | '=')) => plain.push(c),
                Some(c) => return Err(format!("invalid field selector: invalid escape sequence: \\{c}")),
                None => return Err("invalid field selector: invalid escape sequence: \\".to_owned()),
            },
            ',' | '=' => {
                return Err(format!("invalid field selector: unescaped character in value: {}", c as u32));
            }
            c => plain.push(c),
        }
    }
    Ok(plain)
}

/// Checks that an expression has values if its operator takes some, and none if it takes none.
pub(super) fn values_cause(operator: &str, values: &[Value], path: &Path) -> Option<Cause> {
    match operator {
        "In" | "NotIn" if values.is_empty() => {
            Some(path.child("values").required("must be specified when `operator` is 'In' or 'NotIn'"))
        }
        "Exists" | "DoesNotExist" if !values.is_empty() => {
            let detail = "may not be specified when `operator` is 'Exists' or 'DoesNotExist'";
            Some(path.child("values").forbidden(detail))
        }
        _ => None,
    }
}

/// Checks a selector inside an object.
pub(crate) fn label_selector_causes(selector: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = label_causes(read::at(selector, &["matchLabels"]), &path.child("matchLabels"));
    for (index, expression) in items(selector, &["matchExpressions"]).iter().enumerate() {
        let path = path.child("matchExpressions").index(index);
        let values = items(expression, &["values"]);
        match text(expression, &["operator"]) {
            operator @ ("In" | "NotIn" | "Exists" | "DoesNotExist") => {
                causes.extend(values_cause(operator, values, &path));
            }
            other => causes.push(path.child("operator").invalid(other, "not a valid selector operator")),
        }
        let key = text(expression, &["key"]);
        causes.extend(path.child("key").each_invalid(key, names::qualified(key)));
        for (index, value) in values.iter().filter_map(Value::as_str).enumerate() {
            causes.extend(path.child("values").index(index).each_invalid(value, names::label_value(value)));
        }
    }
    causes
}

/// Checks a map of labels.
pub(crate) fn label_causes(labels: &Value, path: &Path) -> Vec<Cause> {
    let mut causes = Vec::new();
    for (key, value) in read::entries(labels, &[]) {
        causes.extend(path.each_invalid(key, names::qualified(key)));
        let value = value.as_str().unwrap_or_default();
        causes.extend(path.each_invalid(value, names::label_value(value)));
    }
    causes
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn selects(selector: &str, labels: &Value) -> bool {
        parse_label_selector(selector).unwrap().matches(labels)
    }

    #[test]
    fn label_selectors_select() {
        let labels = json!({"app": "web", "tier": "front", "n": "5", "example.com/x": ""});
        for selector in [
            "",
            "app",
            "app=web",
            "app==web",
            "app!=db",
            "other!=x",
            "app in (web,db)",
            "app notin (db)",
            "other notin (x)",
            "!other",
            "app=web,tier=front",
            " app = web , tier ",
            "n>4",
            "n<6",
            "example.com/x=",
            "example.com/x",
            "app in (,web)",
            "x notin ()",
            "in!=x",
        ] {
            assert!(selects(selector, &labels), "{selector}");
        }
        for selector in [
            "app=db",
            "app!=web",
            "!app",
            "other",
            "app in (db)",
            "app notin (web)",
            "n>5",
            "app>1",
            "other=",
            "app in ()",
        ] {
            assert!(!selects(selector, &labels), "{selector}");
        }
    }

    #[test]
    fn label_selectors_that_cannot_be_read_say_where() {
        for (selector, message) in [
            ("a b", "unable to parse requirement: found 'b', expected: in, notin, =, ==, !=, gt, lt"),
            ("a=b,", "found '', expected: identifier after ','"),
            (",a", "found ',', expected: !, identifier, or 'end of string'"),
            ("a in b", "unable to parse requirement: found 'b' expected: '('"),
            ("a in (b", "unable to parse requirement: found '', expected: ',' or ')'"),
            ("a=b c", "found 'c', expected: ',' or 'end of string'"),
            ("!", "unable to parse requirement: found '', expected: identifier"),
            ("a=(", "unable to parse requirement: found '(', expected: identifier"),
        ] {
            assert_eq!(parse_label_selector(selector).unwrap_err(), message, "{selector}");
        }
        assert!(parse_label_selector("a=%").unwrap_err().starts_with(
            "unable to parse requirement: values[0][a]: Invalid value: \"%\": a valid label must be"
        ));
        assert!(parse_label_selector("_a=b").unwrap_err().starts_with(
            "unable to parse requirement: <nil>: Invalid value: \"_a\": name part must consist"
        ));
    }

    #[test]
    fn field_selectors_select() {
        let fields = [("metadata.name", "a,b".to_owned()), ("status.phase", "Running".to_owned())];
        for selector in
            ["", "metadata.name=a\\,b", "status.phase!=Pending,metadata.name==a\\,b", "spec.nodeName="]
        {
            assert!(parse_field_selector(selector).unwrap().matches(&fields), "{selector}");
        }
        for selector in ["metadata.name=x", "status.phase!=Running"] {
            assert!(!parse_field_selector(selector).unwrap().matches(&fields), "{selector}");
        }
        assert_eq!(parse_field_selector("metadata.name=x").unwrap().exact("metadata.name"), Some("x"));
        assert_eq!(
            parse_field_selector("nonsense").unwrap_err(),
            "invalid selector: 'nonsense'; can't understand 'nonsense'"
        );
        assert_eq!(
            parse_field_selector("a=b\\c").unwrap_err(),
            "invalid field selector: invalid escape sequence: \\c"
        );
        assert_eq!(
            parse_field_selector("a=b=c").unwrap_err(),
            "invalid field selector: unescaped character in value: 61"
        );
    }

    #[test]
    fn selectors_inside_objects_select_and_are_checked() {
        let selector = json!({"matchLabels": {"a": "b"}, "matchExpressions": [
            {"key": "c", "operator": "In", "values": ["d"]}, {"key": "e", "operator": "DoesNotExist"}]});
        let parsed = LabelSelector::from_value(&selector).unwrap();
        assert!(parsed.matches(&json!({"a": "b", "c": "d"})));
        assert!(!parsed.matches(&json!({"a": "b", "c": "d", "e": ""})));
        assert!(label_selector_causes(&selector, &Path::new("spec").child("selector")).is_empty());
        let bad = json!({"matchExpressions": [{"key": "c", "operator": "In"}, {"key": "c", "operator": "Exists", "values": ["x"]}, {"key": "c", "operator": "Is"}]});
        let causes: Vec<String> =
            label_selector_causes(&bad, &Path::new("selector")).iter().map(ToString::to_string).collect();
        assert_eq!(
            causes,
            [
                "selector.matchExpressions[0].values: Required value: must be specified when `operator` is 'In' or 'NotIn'",
                "selector.matchExpressions[1].values: Forbidden: may not be specified when `operator` is 'Exists' or 'DoesNotExist'",
                "selector.matchExpressions[2].operator: Invalid value: \"Is\": not a valid selector operator",
            ]
        );
    }
}
