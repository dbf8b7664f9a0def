//! Pages of listings whose entries were all read.

use crate::{Error, Page, PageRequest, Result};

/// What tokens begin with, so that one that was never given is recognised.
const AFTER: &str = "after:";

/// The page that is asked for, in the order of the ids.
pub(crate) fn page_of<T>(mut all: Vec<T>, page: &PageRequest, id: impl Fn(&T) -> &str) -> Result<Page<T>> {
    let after = match &page.after {
        None => None,
        Some(token) => Some(
            token
                .strip_prefix(AFTER)
                .ok_or_else(|| Error::Busy(format!("{token:?} is no token of a listing")))?,
        ),
    };
    all.retain(|entry| after.is_none_or(|after| id(entry) > after));
    all.sort_by(|one, other| id(one).cmp(id(other)));
    let is_more = all.len() > page.limit;
    all.truncate(page.limit);
    let next = all.last().filter(|_| is_more).map(|last| format!("{AFTER}{}", id(last)));
    Ok(Page { entries: all, next })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_follow_each_other_and_a_foreign_token_is_refused() {
        let all = || ["c", "a", "b", "d", "e"].map(ToOwned::to_owned).to_vec();
        let (mut seen, mut after) = (Vec::new(), None);
        loop {
            let page = page_of(all(), &PageRequest { after, limit: 2 }, String::as_str).unwrap();
            seen.push(page.entries);
            after = page.next;
            if after.is_none() {
                break;
            }
        }
        assert_eq!(seen, [vec!["a", "b"], vec!["c", "d"], vec!["e"]]);
        let foreign = PageRequest { after: Some("2".to_owned()), limit: 2 };
        assert!(matches!(page_of(all(), &foreign, String::as_str), Err(Error::Busy(_))));
    }
}
