//! Delete: at once, after a grace period, or when the last finalizer goes.

use std::sync::Arc;

use http::Response;
use jiff::{Timestamp, ToSpan};
use serde_json::{Map, Value, json};

use super::error::{Answer, Failure};
use super::request::not_supported;
use super::write::{self, Written};
use super::{Accept, Body, Call, content, crd, object};
use crate::resource::{Cause, CauseReason};
use crate::rules::{self, Operation, read};
use crate::schema::{self, time};
use crate::store::{Expect, Key, Object, WriteError};

const ORPHAN: &str = "orphan";
const FOREGROUND: &str = "foregroundDeletion";
const DELETE_TRIES: usize = 64;
/// Jobs are the only ones whose dependents stay by default.
const ORPHANED: &str = "child pods are preserved by default when jobs are deleted; set propagationPolicy=Background to remove them or set propagationPolicy=Orphan to suppress this warning";

/// How an object is to be deleted.
#[derive(Clone, Debug, Default)]
pub(crate) struct DeleteOptions {
    grace: Option<i64>,
    uid: Option<String>,
    resource_version: Option<String>,
    policy: Option<String>,
    dry_run: bool,
}

/// What became of an object that was to be deleted.
pub(crate) enum Deleted {
    /// It is gone; this was its last state.
    Gone(Value),
    /// It is marked, and stays until others are done with it.
    Marked(Written),
}

impl DeleteOptions {
    /// Reads the options from the query and the body, which wins.
    fn read(call: &Call, bytes: &[u8]) -> Answer<Self> {
        let mut options = call.query.delete_options()?;
        if !bytes.is_empty() {
            let type_ = schema::built_in_type("meta.DeleteOptions").unwrap_or_default();
            let format = content::body_format(&call.parts.headers)?;
            let (mut body, _) = object::parse(format, bytes, &type_).map_err(Failure::bad_request)?;
            // Clients send it in the version of any group.
            let kind = read::text(&body, &["kind"]);
            if !matches!(kind, "" | "DeleteOptions") {
                let version = read::text(&body, &["apiVersion"]);
                return Err(Failure::bad_request(format!(
                    "no kind {kind:?} is registered for version {version:?} in scheme \
                     \"pkg/runtime/scheme.go:111\""
                )));
            }
            if let Some(error) = schema::decode(&type_, &mut body).errors.first() {
                return Err(Failure::bad_request(error.clone()));
            }
            if let Value::Object(body) = body {
                options = body;
            }
        }
        Self::check(&options)
    }

    fn check(options: &Map<String, Value>) -> Answer<Self> {
        let options = Value::Object(options.clone());
        let mut causes = Vec::new();
        let mut policy =
            Some(read::text(&options, &["propagationPolicy"]).to_owned()).filter(|p| !p.is_empty());
        let orphan = options.get("orphanDependents").and_then(Value::as_bool);
        if let Some(policy) = &policy
            && !matches!(policy.as_str(), "Orphan" | "Background" | "Foreground")
        {
            causes.push(not_supported(
                "propagationPolicy",
                &format!("{policy:?}"),
                &["Foreground", "Background", "Orphan", "nil"],
            ));
        }
        if orphan.is_some() && policy.is_some() {
            causes.push(Cause {
                reason: CauseReason::Invalid,
                message: format!(
                    "Invalid value: {:?}: orphanDependents and deletionPropagation cannot be both set",
                    policy.as_deref().unwrap_or_default()
                ),
                field: "propagationPolicy".to_owned(),
            });
        }
        let dry_run = read::items(&options, &["dryRun"]);
        if dry_run.iter().any(|value| value != "All") {
            causes.push(not_supported("dryRun", &Value::from(dry_run.to_vec()).to_string(), &["All"]));
        }
        if !causes.is_empty() {
            return Err(Failure::invalid_options("DeleteOptions", &causes));
        }
        if let (None, Some(orphan)) = (&policy, orphan) {
            policy = Some(if orphan { "Orphan" } else { "Background" }.to_owned());
        }
        let text = |field: &str| {
            Some(read::text(&options, &["preconditions", field]).to_owned()).filter(|text| !text.is_empty())
        };
        Ok(Self {
            // A negative period means as short as can be, but not none.
            grace: read::number(&options, &["gracePeriodSeconds"])
                .map(|grace| if grace < 0 { 1 } else { grace }),
            uid: text("uid"),
            resource_version: text("resourceVersion"),
            policy,
            dry_run: !dry_run.is_empty(),
        })
    }

    fn check_preconditions(&self, call: &Call, object: &Value) -> Answer<()> {
        let (resource, name) = (&call.served.resource, object::text(object, "name"));
        if let Some(uid) = self.uid.as_deref()
            && uid != object::text(object, "uid")
        {
            let why = format!(
                "the UID in the precondition ({uid}) does not match the UID in record ({}). The object might have been \
                 deleted and then recreated",
                object::text(object, "uid")
            );
            return Err(Failure::precondition(resource, name, &why));
        }
        if let Some(version) = self.resource_version.as_deref()
            && version != object::text(object, "resourceVersion")
        {
            let why = format!(
                "the ResourceVersion in the precondition ({version}) does not match the ResourceVersion in record ({}). \
                 The object might have been modified",
                object::text(object, "resourceVersion")
            );
            return Err(Failure::precondition(resource, name, &why));
        }
        Ok(())
    }

    /// The finalizers with what the propagation asks for; `orphans` if dependents are left alone when it asks for nothing.
    fn finalizers(&self, object: &Value, orphans: bool) -> Vec<String> {
        let have = object::finalizers(object);
        let mut finalizers: Vec<String> =
            have.iter().filter(|f| !matches!(**f, ORPHAN | FOREGROUND)).map(|&f| f.to_owned()).collect();
        match self.policy.as_deref() {
            Some("Orphan") => finalizers.push(ORPHAN.to_owned()),
            Some("Foreground") => finalizers.push(FOREGROUND.to_owned()),
            Some(_) => {}
            None => {
                let kept = have.iter().filter(|f| matches!(**f, ORPHAN | FOREGROUND));
                let settled = finalizers.len();
                finalizers.extend(kept.map(|&f| f.to_owned()));
                if orphans && finalizers.len() == settled {
                    finalizers.push(ORPHAN.to_owned());
                }
            }
        }
        finalizers
    }
}

impl Call {
    pub(crate) async fn delete(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let options = DeleteOptions::read(self, bytes)?;
        let current = self.current()?;
        let deleted = self.delete_object(current, &options).await?;
        let mut answer = self.answer_deleted(deleted, options.dry_run).await?;
        self.warn_of_orphans(&options, &mut answer);
        Ok(answer)
    }

    /// Tells who deletes without a word about dependents that they stay.
    fn warn_of_orphans(&self, options: &DeleteOptions, answer: &mut Response<Body>) {
        if self.served.rules.orphans_dependents() && options.policy.is_none() {
            content::warn(answer, &[ORPHANED.to_owned()]);
        }
    }

    async fn answer_deleted(&self, deleted: Deleted, dry_run: bool) -> Answer<Response<Body>> {
        match deleted {
            Deleted::Marked(written) => {
                self.after_write(&written, dry_run).await?;
                self.reply(200, written, Vec::new())
            }
            Deleted::Gone(last) => {
                self.after_write(&Written::Value(last.clone()), dry_run).await?;
                if returns_object(&self.served.resource.group, &self.served.resource.kind) {
                    return self.reply(200, Written::Value(last), Vec::new());
                }
                let mut details = json!({
                    "name": object::text(&last, "name"), "kind": &*self.served.resource.plural,
                    "uid": object::text(&last, "uid"),
                });
                if !self.served.resource.group.is_empty() {
                    details["group"] = (&*self.served.resource.group).into();
                }
                let status = json!({
                    "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Success", "details": details,
                });
                let accept = Accept { shape: super::Shape::Object, ..self.accept };
                Ok(content::respond(200, accept, &status))
            }
        }
    }

    /// Deletes one object, or marks it to be deleted.
    pub(crate) async fn delete_object(
        &self,
        mut current: Arc<Object>,
        options: &DeleteOptions,
    ) -> Answer<Deleted> {
        let name = current.key.name.clone();
        for _ in 0..DELETE_TRIES {
            let old: Value = serde_json::from_slice(&current.bytes).map_err(Failure::internal)?;
            options.check_preconditions(self, &old)?;
            rules::admit(Operation::Delete, &self.served.resource, &mut old.clone(), Some(&old), self)
                .map_err(|denied| Failure::denied(&self.served.resource, &name, &denied))?;
            let Some(new) = self.mark(&old, options) else { return Ok(Deleted::Marked(Written::Value(old))) };
            let gone = !self.waits(&new);
            if options.dry_run {
                return Ok(if gone { Deleted::Gone(new) } else { Deleted::Marked(Written::Value(new)) });
            }
            if !gone && new == old {
                return Ok(Deleted::Marked(Written::Stored(current)));
            }
            let change = if gone { write::remove(&new) } else { write::put(&new) };
            let key = current.key.clone();
            match self.store().write(key, Expect::Revision(current.revision), change).await {
                Ok(stored) if gone => {
                    return Ok(Deleted::Gone(serde_json::from_slice(&stored.bytes).unwrap_or(new)));
                }
                Ok(stored) => return Ok(Deleted::Marked(Written::Stored(stored))),
                Err(WriteError::Conflict(newer)) => current = newer,
                Err(error) => return Err(self.write_failure(&name, error)),
            }
        }
        Err(Failure::modified(&self.served.resource, &name))
    }

    /// Whether an object with these finalizers and this grace stays for now.
    fn waits(&self, new: &Value) -> bool {
        !object::finalizers(new).is_empty()
            || self.is_namespace() && !read::items(new, &["spec", "finalizers"]).is_empty()
            || object::is_deleting(new)
                && read::number(new, &["metadata", "deletionGracePeriodSeconds"]).unwrap_or(0) > 0
    }

    /// Whether it is a definition whose objects have to go first.
    fn has_objects(&self, definition: &Value) -> bool {
        self.is_definition() && !self.store().view(&crd::collection(definition)).is_empty()
    }

    fn is_definition(&self) -> bool {
        &*self.served.resource.group == crd::GROUP && &*self.served.resource.plural == crd::PLURAL
    }

    fn is_namespace(&self) -> bool {
        self.served.resource.group.is_empty() && &*self.served.resource.kind == "Namespace"
    }

    /// The object as it is after the request; `None` when its deletion is under way and stays as it is.
    fn mark(&self, old: &Value, options: &DeleteOptions) -> Option<Value> {
        let mut new = old.clone();
        let orphans = self.served.rules.orphans_dependents();
        if object::is_deleting(old) {
            let left = read::number(old, &["metadata", "deletionGracePeriodSeconds"]).unwrap_or(0);
            if left == 0 {
                object::set_finalizers(&mut new, options.finalizers(old, orphans));
                return Some(new);
            }
            // The grace period of a deletion that is under way can only be shortened.
            let asked = options.grace.filter(|&asked| asked < left)?;
            shorten(&mut new, old, left, asked);
            object::set_finalizers(&mut new, options.finalizers(old, orphans));
            return Some(new);
        }
        let mut finalizers = options.finalizers(old, orphans);
        if self.has_objects(old) && !finalizers.iter().any(|finalizer| finalizer == crd::CLEANUP) {
            finalizers.push(crd::CLEANUP.to_owned());
        }
        object::set_finalizers(&mut new, finalizers);
        let grace = self.served.rules.grace_seconds(old, options.grace);
        let pending = !object::finalizers(&new).is_empty() || self.is_namespace();
        let is_pod = self.served.resource.group.is_empty() && &*self.served.resource.kind == "Pod";
        if grace > 0 || pending || is_pod {
            let metadata = object::metadata(&mut new);
            metadata.insert("deletionTimestamp".to_owned(), object::after(grace).into());
            if !self.is_namespace() {
                metadata.insert("deletionGracePeriodSeconds".to_owned(), grace.into());
            }
            if read::number(old, &["metadata", "generation"]).unwrap_or(0) > 0 {
                object::bump_generation(&mut new);
            }
            if self.is_namespace() {
                read::map(&mut new, &["status"]).insert("phase".to_owned(), "Terminating".into());
            }
        }
        Some(new)
    }

    pub(crate) async fn delete_collection(&self, bytes: &[u8]) -> Answer<Response<Body>> {
        let options = DeleteOptions::read(self, bytes)?;
        let filter = self.filter()?;
        let view = self.store().view(&self.served.collection);
        let objects: Vec<Arc<Object>> = view
            .range(self.namespace_filter(), None)
            .filter(|object| filter.matches(&self.served, object))
            .cloned()
            .collect();
        let mut items = Vec::with_capacity(objects.len());
        for object in objects {
            let value: Value = serde_json::from_slice(&object.bytes).map_err(Failure::internal)?;
            match self.delete_object(object, &options).await {
                Ok(Deleted::Gone(last)) => {
                    self.after_write(&Written::Value(last), options.dry_run).await?;
                    items.push(value);
                }
                Ok(Deleted::Marked(written)) => {
                    self.after_write(&written, options.dry_run).await?;
                    items.push(value);
                }
                // Somebody else deleted it: that is what was wanted.
                Err(failure) if failure.code == 404 => {}
                Err(failure) => return Err(failure),
            }
        }
        let mut metadata = json!({ "resourceVersion": view.revision().to_string() });
        if !self.served.resource.built_in {
            metadata["continue"] = "".into();
        }
        let mut answer = self.presenter()?.respond_list(items, metadata)?;
        self.warn_of_orphans(&options, &mut answer);
        Ok(answer)
    }

    /// Whether something may have to follow when an object of this kind was written.
    pub(crate) fn has_sequel(&self) -> bool {
        self.is_definition()
            || self.is_namespace()
            || self.served.definition.is_some()
            || self.assigns_addresses()
    }

    /// What has to follow a write: definitions take effect, and go when their last object goes.
    pub(crate) async fn after_write(&self, written: &Written, dry_run: bool) -> Answer<()> {
        // Nothing was written.
        if dry_run {
            return Ok(());
        }
        if self.is_definition() {
            self.api.reload_definitions();
            let definition = written.value()?;
            if object::is_deleting(&definition) {
                Box::pin(self.api.clean_up(read::name(&definition))).await?;
            }
        } else if self.is_namespace() && matches!(written, Written::Stored(_)) {
            let namespace = written.value()?;
            if !object::is_deleting(&namespace) {
                Box::pin(self.api.create_namespace_defaults(read::name(&namespace))).await?;
            }
        } else if let Some(definition) = &self.served.definition
            && matches!(written, Written::Value(_))
        {
            Box::pin(self.api.finish_definition(&definition.name)).await?;
        }
        Ok(())
    }
}

impl super::ApiServer {
    /// Deletes all objects of a definition that is being deleted, and then the definition.
    pub(super) async fn clean_up(&self, definition: &str) -> Answer<()> {
        // Only what is stored says that all the objects are to go.
        let stored = self.inner.store.get(&Key::new(crd::definitions(), "", definition));
        let stored = stored.and_then(|object| serde_json::from_slice::<Value>(&object.bytes).ok());
        let Some(stored) = stored.filter(object::is_deleting) else { return Ok(()) };
        // Not from the registry: there may be no version that is served.
        let Some(served) = crd::stored(&stored).map(Arc::new) else {
            return self.finish_definition(definition).await;
        };
        let objects: Vec<Arc<Object>> =
            self.inner.store.view(&served.collection).range(None, None).cloned().collect();
        for object in objects {
            let call = self.internal(served.clone(), &object.key.namespace, &object.key.name);
            match call.delete_object(object, &DeleteOptions::default()).await {
                Ok(_) => {}
                Err(failure) if failure.code == 404 => {}
                Err(failure) => return Err(failure),
            }
        }
        self.finish_definition(definition).await
    }

    /// Lets a definition that is being deleted go if it has no objects left.
    async fn finish_definition(&self, name: &str) -> Answer<()> {
        let registry = self.registry();
        let Some(served) = registry.find(crd::GROUP, "v1", crd::PLURAL).cloned() else { return Ok(()) };
        let call = self.internal(served, "", name);
        let Ok(current) = call.current() else { return Ok(()) };
        let definition: Value = serde_json::from_slice(&current.bytes).map_err(Failure::internal)?;
        if !object::is_deleting(&definition) {
            return Ok(());
        }
        if !self.inner.store.view(&crd::collection(&definition)).is_empty() {
            return Ok(());
        }
        let mut new = definition.clone();
        let left = object::finalizers(&definition).into_iter().filter(|&finalizer| finalizer != crd::CLEANUP);
        object::set_finalizers(&mut new, left.map(str::to_owned).collect());
        let gone = object::finalizers(&new).is_empty();
        let change = if gone { write::remove(&new) } else { write::put(&new) };
        let written =
            self.inner.store.write(current.key.clone(), Expect::Revision(current.revision), change).await;
        // Whoever changed it meanwhile comes by here as well.
        if let Err(error) = written
            && !matches!(error, WriteError::Conflict(_) | WriteError::Missing)
        {
            return Err(Failure::internal(error));
        }
        self.reload_definitions();
        Ok(())
    }
}

/// Moves the end of a deletion that is under way forward.
fn shorten(new: &mut Value, old: &Value, left: i64, asked: i64) {
    let end = time::parse(object::text(old, "deletionTimestamp")).unwrap_or_else(Timestamp::now);
    let earlier = end.checked_add((asked - left).seconds()).unwrap_or(end);
    let now = Timestamp::now();
    let (end, grace) = if earlier < now { (now, asked.min(1)) } else { (earlier, asked) };
    let metadata = object::metadata(new);
    metadata.insert("deletionTimestamp".to_owned(), time::write(end).into());
    metadata.insert("deletionGracePeriodSeconds".to_owned(), grace.into());
}

/// Kinds whose deletion answers with the object instead of a status.
fn returns_object(group: &str, kind: &str) -> bool {
    match group {
        "" => matches!(
            kind,
            "Namespace"
                | "PersistentVolume"
                | "PersistentVolumeClaim"
                | "Pod"
                | "ResourceQuota"
                | "Service"
                | "ServiceAccount"
        ),
        "storage.k8s.io" => kind != "CSIStorageCapacity",
        _ => false,
    }
}
