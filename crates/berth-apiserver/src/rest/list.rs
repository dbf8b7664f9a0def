//! List: selectors, pages of one snapshot, versions; stored bytes are sent as they are whenever possible.

use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use berth_core::names::META_V1;
use bytes::Bytes;
use http::Response;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::error::{Answer, Failure};
use super::registry::Served;
use super::request::{forbidden, not_supported};
use super::{Body, Call, content};
use crate::resource::Cause;
use crate::rules::{FieldSelector, LabelSelector, parse_field_selector, parse_label_selector};
use crate::store::{Object, View};

/// How long a list waits for a version that is not there yet.
const VERSION_TIMEOUT: Duration = Duration::from_secs(3);
const EXPIRED: &str = "The provided continue parameter is too old to display a consistent list result. You can start a \
                       new list without the continue parameter, or use the continue token in this response to retrieve \
                       the remainder of the results. Continuing with the provided token results in an inconsistent list \
                       - objects that were created, modified, or deleted between the time the first chunk was returned \
                       and now may show up in the list.";

/// Which objects are wanted.
pub(crate) struct Filter {
    labels: LabelSelector,
    fields: FieldSelector,
}

#[derive(Deserialize)]
struct Labelled {
    #[serde(default)]
    metadata: Labels,
}

#[derive(Deserialize, Default)]
struct Labels {
    #[serde(default)]
    labels: Value,
}

impl Filter {
    /// Whether everything is wanted.
    pub(crate) fn is_empty(&self) -> bool {
        self.labels.is_empty() && self.fields.is_empty()
    }

    /// Whether an object is wanted; only as much of it is read as the answer needs.
    pub(crate) fn matches(&self, served: &Served, object: &Object) -> bool {
        if self.is_empty() {
            return true;
        }
        let key = &object.key;
        if self.fields.exact("metadata.name").is_some_and(|name| name != &*key.name)
            || self.fields.exact("metadata.namespace").is_some_and(|namespace| namespace != &*key.namespace)
        {
            return false;
        }
        let by_key = |field: &str| matches!(field, "metadata.name" | "metadata.namespace");
        let fields_match = if self.fields.fields().all(by_key) {
            let own =
                [("metadata.name", key.name.to_string()), ("metadata.namespace", key.namespace.to_string())];
            self.fields.matches(&own)
        } else {
            let value: Value = serde_json::from_slice(&object.bytes).unwrap_or_default();
            self.fields.matches(&served.rules.selectable_fields(&value))
        };
        if !fields_match || self.labels.is_empty() {
            return fields_match;
        }
        let labelled: Result<Labelled, _> = serde_json::from_slice(&object.bytes);
        labelled.is_ok_and(|object| self.labels.matches(&object.metadata.labels))
    }
}

/// Where a list goes on.
#[derive(Serialize, Deserialize)]
struct Continue {
    v: String,
    rv: i64,
    start: String,
    /// How many objects are left after those already given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    left: Option<u64>,
}

impl Continue {
    fn after(rv: i64, last: &Object, left: Option<u64>) -> String {
        let start = format!("{}/{}", last.key.namespace, last.key.name);
        let token = Self { v: META_V1.to_owned(), rv, start, left };
        URL_SAFE_NO_PAD.encode(serde_json::to_string(&token).unwrap_or_default())
    }

    fn read(text: &str) -> Answer<Self> {
        let bad = |why: &str| {
            Failure::bad_request(format!("invalid continue token: continue key is not valid: {why}"))
        };
        let bytes =
            URL_SAFE_NO_PAD.decode(text.trim_end_matches('=')).map_err(|error| bad(&error.to_string()))?;
        let token: Self = serde_json::from_slice(&bytes).map_err(|error| bad(&error.to_string()))?;
        if token.v != META_V1 {
            return Err(bad(&format!("server does not recognize this encoded version {:?}", token.v)));
        }
        if token.rv == 0 {
            return Err(bad(&format!("incorrect encoded start resourceVersion (version {META_V1})")));
        }
        if !token.start.contains('/') {
            return Err(bad(&format!("encoded start key empty (version {META_V1})")));
        }
        Ok(token)
    }
}

struct Page {
    objects: Vec<Arc<Object>>,
    revision: u64,
    next: Option<String>,
    left: Option<u64>,
}

impl Call {
    /// The namespace to list, or all.
    pub(crate) fn namespace_filter(&self) -> Option<&str> {
        (self.served.resource.namespaced && !self.namespace.is_empty()).then_some(self.namespace.as_str())
    }

    /// The selectors of the request.
    pub(crate) fn filter(&self) -> Answer<Filter> {
        let labels = parse_label_selector(self.query.get("labelSelector").unwrap_or_default())
            .map_err(Failure::bad_request)?;
        let mut text = self.query.get("fieldSelector").unwrap_or_default().to_owned();
        if !self.name.is_empty() {
            text = format!("metadata.name={}", self.name);
        }
        let fields = parse_field_selector(&text).map_err(Failure::bad_request)?;
        for field in fields.fields() {
            if !self.served.rules.supports_field(field) {
                return Err(unknown_field(&self.served, field));
            }
        }
        Ok(Filter { labels, fields })
    }

    pub(crate) async fn list(&self) -> Answer<Response<Body>> {
        let filter = self.filter()?;
        let presenter = self.presenter()?;
        let page = self.page(&filter).await?;
        let mut metadata = json!({ "resourceVersion": page.revision.to_string() });
        if let Some(next) = page.next {
            metadata["continue"] = next.into();
        } else if !self.served.resource.built_in {
            metadata["continue"] = "".into();
        }
        if let Some(left) = page.left {
            metadata["remainingItemCount"] = left.into();
        }
        if presenter.is_plain() {
            let bytes = concatenate(&self.served, &metadata, &page.objects);
            return Ok(content::respond_bytes(200, "application/json", self.accept.gzip, bytes));
        }
        let objects = page
            .objects
            .iter()
            .map(|object| serde_json::from_slice(&object.bytes).map_err(Failure::internal))
            .collect::<Answer<Vec<Value>>>()?;
        presenter.respond_list(objects, metadata)
    }

    async fn page(&self, filter: &Filter) -> Answer<Page> {
        let limit = self.limit()?;
        let token = self.query.get("continue").map(Continue::read).transpose()?;
        let view = self.list_view(token.as_ref()).await?;
        let after = token.as_ref().and_then(|token| token.start.split_once('/'));
        let mut wanted =
            view.range(self.namespace_filter(), after).filter(|object| filter.matches(&self.served, object));
        let Some(limit) = limit else {
            return Ok(Page {
                objects: wanted.cloned().collect(),
                revision: view.revision(),
                next: None,
                left: None,
            });
        };
        let objects: Vec<Arc<Object>> = wanted.by_ref().take(limit).cloned().collect();
        if wanted.next().is_none() {
            return Ok(Page { objects, revision: view.revision(), next: None, left: None });
        }
        // With selectors the rest is not counted, as in Kubernetes.
        let left = filter.is_empty().then(|| match token.as_ref().and_then(|token| token.left) {
            Some(before) => before.saturating_sub(objects.len() as u64),
            None => 1 + wanted.count() as u64,
        });
        let rv =
            token.as_ref().map_or_else(|| i64::try_from(view.revision()).unwrap_or(-1), |token| token.rv);
        let next = objects.last().map(|last| Continue::after(rv, last, left));
        Ok(Page { objects, revision: view.revision(), next, left })
    }

    fn limit(&self) -> Answer<Option<usize>> {
        let limit = self.query.number("limit")?.filter(|&limit| limit > 0);
        // A list from the cache is given whole.
        if self.query.get("resourceVersion") == Some("0") && self.query.get("continue").is_none() {
            return Ok(None);
        }
        Ok(limit.and_then(|limit| usize::try_from(limit).ok()))
    }

    async fn list_view(&self, token: Option<&Continue>) -> Answer<View> {
        let version = self.query.get("resourceVersion");
        let matching = self.query.get("resourceVersionMatch");
        let causes = self.list_causes(version, matching);
        if !causes.is_empty() {
            return Err(Failure::invalid_options("ListOptions", &causes));
        }
        let collection = &self.served.collection;
        let store = self.store();
        if let Some(token) = token {
            if version.is_some_and(|version| version != "0") {
                return Err(Failure::bad_request(
                    "specifying resource version is not allowed when using continue",
                ));
            }
            // A token without a version goes on in whatever is there now.
            let Ok(revision) = u64::try_from(token.rv) else { return Ok(store.view(collection)) };
            return store.view_at(collection, revision).map_err(|_| {
                let start =
                    Continue { v: META_V1.to_owned(), rv: -1, start: token.start.clone(), left: None };
                let fresh = URL_SAFE_NO_PAD.encode(serde_json::to_string(&start).unwrap_or_default());
                Failure { next: Some(fresh), ..Failure::expired(EXPIRED) }
            });
        }
        let Some(version) = version else { return Ok(store.view(collection)) };
        let wanted = parse_version(version)
            .map_err(|why| Failure::bad_request(format!("invalid resource version: {why}")))?;
        if wanted > store.revision() && !store.wait_for(wanted, VERSION_TIMEOUT).await {
            return Err(Failure::too_large_version(wanted, store.revision()));
        }
        if matching == Some("Exact") {
            return store.view_at(collection, wanted).map_err(|_| {
                Failure::expired(format!("The provided resource version is too old: {wanted}"))
            });
        }
        Ok(store.view(collection))
    }

    fn list_causes(&self, version: Option<&str>, matching: Option<&str>) -> Vec<Cause> {
        let field = "resourceVersionMatch";
        let mut causes = Vec::new();
        if let Some(matching) = matching {
            if version.is_none() {
                causes.push(forbidden(
                    field,
                    "resourceVersionMatch is forbidden unless resourceVersion is provided",
                ));
            }
            if self.query.get("continue").is_some() {
                causes.push(forbidden(field, "resourceVersionMatch is forbidden when continue is provided"));
            }
            if !matches!(matching, "Exact" | "NotOlderThan") {
                causes.push(not_supported(field, &format!("{matching:?}"), &["Exact", "NotOlderThan", ""]));
            }
            if matching == "Exact" && version == Some("0") {
                let why = "resourceVersionMatch \"exact\" is forbidden for resourceVersion \"0\"";
                causes.push(forbidden(field, why));
            }
        }
        if self.query.flag_if_given("sendInitialEvents").is_some() {
            causes.push(forbidden("sendInitialEvents", "sendInitialEvents is forbidden for list"));
        }
        causes
    }
}

fn unknown_field(served: &Served, field: &str) -> Failure {
    let resource = &served.resource;
    let own = ["Event", "Namespace", "Node", "Pod", "Secret", "Service"];
    let has_own = !resource.built_in
        || matches!(&*resource.group, "" | "events.k8s.io") && own.contains(&&*resource.kind);
    Failure::bad_request(if has_own {
        format!("field label not supported: {field}")
    } else {
        format!("{field:?} is not a known field selector: only \"metadata.name\", \"metadata.namespace\"")
    })
}

/// Reads a resource version.
pub(crate) fn parse_version(text: &str) -> Result<u64, String> {
    text.parse().map_err(|_| format!("resourceVersion: Invalid value: {text:?}: must be a whole number"))
}

/// The list as bytes, out of the bytes of its objects.
fn concatenate(served: &Served, metadata: &Value, objects: &[Arc<Object>]) -> Bytes {
    let size: usize = objects.iter().map(|object| object.bytes.len() + 1).sum();
    let mut bytes = Vec::with_capacity(size + 256);
    let head = format!(
        "{{\"kind\":{},\"apiVersion\":{},\"metadata\":{metadata},\"items\":[",
        Value::from(&*served.resource.list_kind),
        Value::from(served.api_version.as_str()),
    );
    bytes.extend_from_slice(head.as_bytes());
    // The list says what kind its items are; stored objects begin with saying it, too.
    let own = format!(
        "{{\"apiVersion\":{},\"kind\":{},",
        Value::from(served.api_version.as_str()),
        Value::from(&*served.resource.kind),
    );
    for (index, object) in objects.iter().enumerate() {
        if index > 0 {
            bytes.push(b',');
        }
        match object.bytes.strip_prefix(own.as_bytes()).filter(|_| served.resource.built_in) {
            Some(rest) => {
                bytes.push(b'{');
                bytes.extend_from_slice(rest);
            }
            None => bytes.extend_from_slice(&object.bytes),
        }
    }
    bytes.extend_from_slice(b"]}\n");
    bytes.into()
}
