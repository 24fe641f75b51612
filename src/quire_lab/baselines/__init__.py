"""What paging, continuous batching and unified adapter pages are measured against."""
