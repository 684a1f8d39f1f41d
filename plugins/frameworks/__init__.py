"""Other frameworks' extension points, one file each."""
