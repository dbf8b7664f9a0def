//! The text of an error together with its causes.

use std::error::Error;

/// Returns the text of `error` followed by the text of each of its causes, separated by colons.
///
/// A cause whose text already ends the sentence is left out: many error types repeat their source in their own text.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.ends_with(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("{text}")]
    struct Failure {
        text: &'static str,
        source: Option<Box<Failure>>,
    }

    #[test]
    fn every_cause_is_named_once() {
        let innermost = Failure { text: "permission denied", source: None };
        let middle = Failure { text: "open /data: permission denied", source: Some(Box::new(innermost)) };
        let outermost = Failure { text: "start the driver", source: Some(Box::new(middle)) };
        assert_eq!(error_chain(&outermost), "start the driver: open /data: permission denied");
    }
}
