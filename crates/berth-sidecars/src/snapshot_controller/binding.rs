//! Snapshots and groups of them are bound to contents in the same way: one algorithm, two kinds.
//!
//! [`Controller::sync`] observes an object and its content, has the kind plan the steps, and carries them out one after the
//! other. What differs is in the kinds' own modules: what is observed, which content is made, and what members need.

use berth_core::names::events;
use std::sync::Arc;

use berth_kube::{Cache, Key, Kind, Next, finalizers};
use jiff::Timestamp;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{Resource as _, ResourceExt as _};

use super::Controller;
use super::creation::{Class, Refusal};
use super::metrics::{self, Operations};
use crate::failure::Failure;
use crate::snapshots::SnapshotError;

/// One write, or one for each member of a group, in the order in which they are made.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step<S> {
    /// Add these finalizers, so that the object stays.
    Protect(Vec<&'static str>),
    /// Let the object go, as far as these finalizers are concerned.
    Release(Vec<&'static str>),
    /// Create the content that it is to be bound to.
    Create,
    /// Write into an existing content which object it belongs to.
    Bind,
    /// Write this status into the object.
    Status(S),
    /// Something between a group and its members.
    Group(GroupStep),
    /// It cannot go on; the event's reason and the message.
    Fail(&'static str, String),
    /// It cannot be deleted yet; the message.
    Pending(String),
    /// Annotate the content: its object is being deleted.
    MarkContent,
    /// Delete the content it is bound to.
    DeleteContent,
}

/// A step between a group and its members.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum GroupStep {
    /// A member goes with its group.
    Own,
    /// Make the objects of a group's members.
    Members,
    /// Delete a group's members.
    DeleteMembers,
}

/// What is said of a kind, and where.
pub(super) struct Words {
    /// A person's words for an object of the kind: in the middle of a sentence, and at its beginning.
    pub(super) what: &'static str,
    pub(super) name: &'static str,
    /// The kind of its contents.
    pub(super) content: &'static str,
    /// The reasons of the events about an object of the kind.
    pub(super) creating: &'static str,
    pub(super) not_created: &'static str,
    pub(super) created: &'static str,
    pub(super) ready: &'static str,
    pub(super) not_bound: &'static str,
    pub(super) not_deleted: &'static str,
}

/// A VolumeSnapshot, or a VolumeGroupSnapshot.
pub(super) trait Bindable: Kind {
    type Status: Send;
    type Content: Content;
    type Class: Class;
    const WORDS: Words;
    /// What it goes through, as the metrics call it.
    const OPERATIONS: metrics::Names;

    /// Where its objects are found; `None` while the cluster does not serve the kind.
    fn caches(controller: &Controller) -> Option<Caches<'_, Self>>;
    /// Whether its content was there before it.
    fn is_given(&self) -> bool;
    /// The content that it is bound to, or would be.
    fn content_name(&self) -> Option<String>;
    /// Whether the driver has taken it.
    fn is_taken(&self) -> bool;
    /// Whether it can be restored from.
    fn is_ready(&self) -> bool;
    /// What last went wrong.
    fn error(&self) -> Option<&SnapshotError>;
    /// Puts into its status what went wrong.
    fn fail(&mut self, error: SnapshotError);
    fn set_status(&mut self, status: Self::Status);
    fn class_name(&self) -> Option<&String>;
    fn class_name_mut(&mut self) -> &mut Option<String>;
    /// What to do about it.
    fn plan(&self, controller: &Controller, content: Option<&Self::Content>) -> Vec<Step<Self::Status>>;
    /// The content to make for it.
    fn new_content(&self, controller: &Controller) -> Result<Self::Content, Refusal>;
    /// Keeps what it is taken of, before its content is made.
    fn protect_source(&self, controller: &Controller) -> impl Future<Output = Result<(), Failure>> + Send;
    /// A step between group and members; the object as it is afterwards, or `None` if nothing more can be done now.
    fn group_step(
        self: &Arc<Self>,
        controller: &Controller,
        content: Option<&Arc<Self::Content>>,
        step: GroupStep,
    ) -> impl Future<Output = Result<Option<Arc<Self>>, Failure>> + Send;
}

/// The objects of a kind, their contents and their classes.
pub(super) struct Caches<'a, B: Bindable> {
    pub(super) objects: &'a Cache<B>,
    pub(super) contents: &'a Cache<B::Content>,
    pub(super) classes: &'a Cache<B::Class>,
}

/// A VolumeSnapshotContent, or a VolumeGroupSnapshotContent.
pub(super) trait Content: Kind {
    /// Keeps it for as long as something is bound to it.
    const FINALIZER: &'static str;
    /// The annotation that says that what it is bound to is being deleted.
    const BEING_DELETED: &'static str;
    /// The reason of an event, and what a person should know, if it cannot be used as it is.
    const INVALID: (&'static str, &'static str);

    fn driver(&self) -> &str;
    /// How many sources it names.
    fn sources(&self) -> usize;
    /// The object that it belongs to.
    fn owner(&self) -> &ObjectReference;
    fn bind(&mut self, uid: Option<String>);
    fn class_name(&self) -> Option<&String>;
    fn class_name_mut(&mut self) -> &mut Option<String>;
    /// Whether it has the driver's id of what was taken.
    fn is_taken(&self) -> bool;
}

/// What is to be done about a content.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ContentPlan {
    /// Nothing, until something changes. That its snapshot does not exist is no reason to delete it.
    Nothing,
    /// It cannot be used as it is.
    Invalid,
    /// It must not go without its snapshot.
    Protect,
}

/// What to do about a content that names so many sources, is bound or not, going or not, protected or not.
pub(super) fn plan_content(sources: usize, bound: bool, deleting: bool, protected: bool) -> ContentPlan {
    match (sources, bound && !deleting && !protected) {
        (1, true) => ContentPlan::Protect,
        (1, false) => ContentPlan::Nothing,
        _ => ContentPlan::Invalid,
    }
}

impl Controller {
    /// Lets the metrics see what the objects of a kind go through.
    pub(super) fn measure<B: Bindable>(&self) {
        let Some(Caches { objects, contents, classes }) = B::caches(self) else { return };
        let (contents, classes) = (contents.clone(), classes.clone());
        let operations = Operations::new(&self.options.metrics, B::OPERATIONS);
        objects.subscribe(move |before, after| {
            let Some(object) = after.or(before) else { return };
            let content = object.content_name().and_then(|name| contents.named(&name));
            let of_class = || Some(classes.named(object.class_name()?)?.driver().to_owned());
            let observed = metrics::ObservedObject {
                uid: object.uid().unwrap_or_default(),
                driver: content.map(|content| content.driver().to_owned()).or_else(of_class),
                given: object.is_given(),
                taken: object.is_taken(),
                ready: object.is_ready(),
                deleting: object.meta().deletion_timestamp.is_some(),
            };
            if after.is_some() { operations.observe(&observed) } else { operations.gone(&observed) }
        });
    }

    /// Reconciles a snapshot or a group.
    pub(super) async fn sync<B: Bindable>(&self, key: &Key) -> Result<Next, Failure> {
        let Some(Caches { objects, contents, .. }) = B::caches(self) else { return Ok(Next::Done) };
        let Some(mut object) = objects.get(key) else { return Ok(Next::Done) };
        let content = match object.content_name() {
            None => None,
            Some(name) => match contents.named(&name) {
                // Whether an object that goes leaves a content behind is asked, not believed.
                None if object.meta().deletion_timestamp.is_some() => {
                    self.cluster.fetch(&Key::cluster(name)).await?
                }
                known => known,
            },
        };
        for step in object.plan(self, content.as_deref()) {
            match self.carry_out(&object, content.as_ref(), step).await? {
                Some(next) => object = next,
                None => return Ok(Next::Done),
            }
        }
        Ok(Next::Done)
    }

    /// One step; the object as it is afterwards, or `None` if nothing more can be done now.
    async fn carry_out<B: Bindable>(
        &self,
        object: &Arc<B>,
        content: Option<&Arc<B::Content>>,
        step: Step<B::Status>,
    ) -> Result<Option<Arc<B>>, Failure> {
        match (step, content) {
            (Step::Protect(added), _) => {
                let protect = |object: &mut B| {
                    if object.meta().deletion_timestamp.is_none() {
                        for finalizer in &added {
                            finalizers::add(object, finalizer);
                        }
                    }
                };
                let protected = self.cluster.edit(object.as_ref(), protect).await?;
                // One that is going already, by a word that has not come here yet, gets no content any more.
                Ok(protected.filter(|object| object.meta().deletion_timestamp.is_none()))
            }
            (Step::Release(removed), _) => {
                let release = |object: &mut B| {
                    for finalizer in &removed {
                        finalizers::remove(object, finalizer);
                    }
                };
                Ok(self.cluster.edit(object.as_ref(), release).await?)
            }
            (Step::Create, _) => self.create(object).await,
            (Step::Status(after), _) => self.write_status(object, after).await.map(Some),
            (Step::Group(step), content) => object.group_step(self, content, step).await,
            (Step::Fail(reason, message), _) => {
                self.fail(object, reason, &message).await?;
                Ok(None)
            }
            (Step::Pending(message), _) => {
                self.recorder.warning(object.as_ref(), events::SNAPSHOT_DELETE_PENDING, message);
                Ok(None)
            }
            (Step::Bind, Some(content)) => self.bind(object, content).await,
            (Step::MarkContent, Some(content)) => {
                let marked = self.cluster.edit(content.as_ref(), |content| {
                    content.annotations_mut().insert(B::Content::BEING_DELETED.to_owned(), "yes".to_owned());
                    // One that was bound only now may not be kept yet, and would go without its object.
                    if content.is_taken() && content.meta().deletion_timestamp.is_none() {
                        finalizers::add(content, B::Content::FINALIZER);
                    }
                });
                marked.await?;
                Ok(Some(object.clone()))
            }
            (Step::DeleteContent, Some(content)) => {
                if let Err(error) = self.cluster.delete(content.as_ref()).await {
                    let what = B::WORDS.what;
                    let text = format!("Failed to delete {what} content API object: {}", error.chain());
                    self.recorder.warning(object.as_ref(), B::WORDS.not_deleted, text);
                    return Err(error.into());
                }
                Ok(Some(object.clone()))
            }
            (Step::Bind | Step::MarkContent | Step::DeleteContent, None) => Ok(None),
        }
    }

    /// Makes the content: the object's class, then the protection of its source, then the content.
    async fn create<B: Bindable>(&self, object: &Arc<B>) -> Result<Option<Arc<B>>, Failure> {
        let content = match object.new_content(self) {
            Ok(content) => content,
            Err(refusal) => {
                self.fail(object, refusal.reason, &refusal.message).await?;
                return Ok(None);
            }
        };
        let chosen = self.cluster.edit(object.as_ref(), |object| {
            let own = object.class_name_mut();
            if own.is_none() {
                *own = content.class_name().cloned();
            }
        });
        let Some(object) = chosen.await? else { return Ok(None) };
        object.protect_source(self).await?;
        let (key, what) = (Key::of(object.as_ref()), B::WORDS.what);
        match self.cluster.create(&content).await {
            Ok(_) => {}
            // Whose it is shows at the next reconciliation, which its own arrival in the cache brings.
            Err(error) if error.is_already_exists() => {
                self.cluster.fetch::<B::Content>(&Key::of(&content)).await?;
                return Ok(None);
            }
            Err(error) => {
                let whose = if what == "snapshot" { "volume snapshot" } else { what };
                let text =
                    format!("Error creating {whose} content object for {what} {key}: {}.", error.chain());
                self.recorder.warning(object.as_ref(), B::WORDS.not_created, text);
                return Err(error.into());
            }
        }
        let text = format!("Waiting for a {what} {key} to be created by the CSI driver.");
        self.recorder.normal(object.as_ref(), B::WORDS.creating, text);
        Ok(Some(object))
    }

    /// Binds an existing content to its object.
    async fn bind<B: Bindable>(
        &self,
        object: &Arc<B>,
        content: &Arc<B::Content>,
    ) -> Result<Option<Arc<B>>, Failure> {
        let bound = self.cluster.update(content.as_ref(), |content| {
            content.bind(object.uid());
            let class = content.class_name_mut();
            if class.is_none() {
                *class = object.class_name().cloned();
            }
        });
        match bound.await {
            Ok(_) => Ok(Some(object.clone())),
            Err(error) if error.is_conflict() => Err(error.into()),
            Err(error) => {
                let Words { name, content, not_bound, .. } = B::WORDS;
                let text = format!("{name} failed to bind {content}, {}", error.chain());
                self.fail(object, not_bound, &text).await?;
                Err(error.into())
            }
        }
    }

    /// Writes a new status, and records the event that belongs to it.
    async fn write_status<B: Bindable>(&self, object: &Arc<B>, after: B::Status) -> Result<Arc<B>, Failure> {
        let written = self.cluster.update_status(object.as_ref(), |object| object.set_status(after)).await?;
        let (key, name) = (Key::of(object.as_ref()), B::WORDS.name);
        if !object.is_taken() && written.is_taken() {
            let text = format!("{name} {key} was successfully created by the CSI driver.");
            self.recorder.normal(object.as_ref(), B::WORDS.created, text);
        }
        if !object.is_ready() && written.is_ready() {
            let text = format!("{name} {key} is ready to use.");
            self.recorder.normal(object.as_ref(), B::WORDS.ready, text);
        }
        Ok(written)
    }

    /// Reports what cannot go on: in the status, and once by an event. It is reconciled again when something changes.
    async fn fail<B: Bindable>(&self, object: &Arc<B>, reason: &str, message: &str) -> Result<(), Failure> {
        if object.error().and_then(|error| error.message.as_deref()) == Some(message) {
            return Ok(());
        }
        self.recorder.warning(object.as_ref(), reason, message);
        let failed = self.cluster.edit_status(object.as_ref(), |object| {
            let (time, message) = (Some(Time(Timestamp::now())), Some(message.to_owned()));
            object.fail(SnapshotError { time, message });
        });
        failed.await?;
        Ok(())
    }

    /// Reconciles a content: checked, and kept for as long as something is bound to it.
    pub(super) async fn sync_content<B: Bindable>(&self, key: &Key) -> Result<Next, Failure> {
        let content = B::caches(self).and_then(|caches| caches.contents.get(key));
        let Some(content) = content else { return Ok(Next::Done) };
        let bound = content.owner().uid.as_deref().is_some_and(|uid| !uid.is_empty());
        let deleting = content.meta().deletion_timestamp.is_some();
        let protected = finalizers::has(content.as_ref(), B::Content::FINALIZER);
        match plan_content(content.sources(), bound, deleting, protected) {
            ContentPlan::Nothing => {}
            ContentPlan::Invalid => {
                let (reason, text) = B::Content::INVALID;
                self.recorder.warning(content.as_ref(), reason, text);
                tracing::warn!(content = content.name_any(), text, "a content cannot be used");
            }
            ContentPlan::Protect => {
                let kept = self.cluster.edit(content.as_ref(), |content| {
                    if content.meta().deletion_timestamp.is_none() {
                        finalizers::add(content, B::Content::FINALIZER);
                    }
                });
                kept.await?;
            }
        }
        Ok(Next::Done)
    }
}

#[cfg(test)]
mod tests;
